"""The decode step as a plain forward: any method, any device, one host wait a token."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from kvfactory.cache.batch import BatchCache
from kvfactory.cache.kv_cache import AttachedCache
from kvfactory.model_parts import input_device
from kvfactory.monkeypatch import get_attachment
from kvfactory.rows import NEAR_TIE, Counters, Finished, LiveRow


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: torch.Tensor, cache: AttachedCache, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """One forward of ids (R, t) -> float32 logits (R, V) of the last token; `positions` (R, t) when rows differ."""
    keyword = get_attachment(model).cache_keyword
    out = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{keyword: cache})
    return out.logits[:, -1].float()


def choose(logits: torch.Tensor, rows: list[LiveRow]) -> list[int]:
    """Greedy tokens of logits (R, V), which are changed; a row that cannot stop yet takes its best other token."""
    for i, row in enumerate(rows):
        if row.cannot_stop:
            logits[i, row.stops_below(logits.shape[1])] = -torch.inf
    if len(rows) > 1:
        best = logits.topk(2, dim=-1).values
        for row, gap in zip(rows, (best[:, 0] - best[:, 1]).tolist(), strict=True):
            row.output.near_ties += gap < NEAR_TIE
    return logits.argmax(dim=-1).tolist()


class LoopEngine:
    """Rows in flight: one row decodes on its own cache, several share a batch cache.

    Attributes:
        live: the rows, in the order of the batch.
    """

    def __init__(self, model: PreTrainedModel, counters: Counters):
        self.model = model
        self.counters = counters
        self.live: list[LiveRow] = []
        self._batch: BatchCache | None = None

    def enter(self, entering: list[LiveRow]) -> None:
        """Takes rows in that have their first token.

        Raises:
            Exception: no memory for a batch of all; they are lost then, those in flight too.
        """
        try:
            self._regroup(list(range(len(self.live))), entering)
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        self.live, self._batch = [], None

    def _regroup(self, staying: list[int], entering: list[LiveRow]) -> None:
        if not entering and len(staying) == len(self.live):
            return
        rows = [self.live[i] for i in staying] + entering
        # A single row keeps being read from the batch it is in; only a row that was alone starts one.
        if self._batch is None and len(rows) > 1:
            self._batch = BatchCache(get_attachment(self.model))
            staying, entering = [], rows
        if self._batch is not None:
            slack = max((row.room for row in rows), default=0)
            self._batch.regroup(staying, [row.output.cache for row in entering], slack)
        self.live = rows
        if not rows:
            self._batch = None

    def step(self) -> Iterator[Finished]:
        """One token for every row in flight -> those that finished, or all with the error of a failed step."""
        rows, device = self.live, input_device(self.model)
        tokens = torch.tensor([[row.output.tokens[-1]] for row in rows], device=device)
        positions = torch.tensor([[row.position] for row in rows], device=device)
        cache = rows[0].output.cache if self._batch is None else self._batch
        start = time.perf_counter()
        try:
            chosen = choose(forward(self.model, tokens, cache, positions), rows)  # tolist() waits for the device
            self.counters.count_step(len(rows))
            seconds = time.perf_counter() - start
            finished = [i for i, row in enumerate(rows) if row.advance(chosen[i], len(rows), seconds)]
            if finished:
                self._regroup([i for i in range(len(rows)) if i not in finished], [])
        except Exception as error:
            self._drop()
            yield from (row.result(error) for row in rows)
            return
        yield from (rows[i].result() for i in finished)
