"""Rows in flight: prompts are prefilled alone, what they leave decodes together, one forward a step for all.

Prefilling alone keeps the numerics of batch 1 and needs no padding. One prompt may leave several rows, when several
methods or budgets compress the same prompt pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvfactory.cache.batch import BatchCache, FanOutCache
from kvfactory.cache.kv_cache import AttachedCache, CacheBytes, KVCache
from kvfactory.monkeypatch import Attachment, cache_keyword, get_attachment
from kvfactory.plan import Plan

NEAR_TIE = 1e-3
"""Logits closer than this may swap places when rows share a batch: batched matrix products differ in the last bits."""


@dataclass
class Request:
    """One prompt to generate from.

    Attributes:
        ids: (S,) token ids.
        stops: ids that end a row; min_new: so many first tokens cannot be stops.
        plans: the methods that compress this prompt, one row each.
        tag: anything the caller wants back with the rows.
        template_tail: tokens of chat template at the end, in front of which observation windows lie; 0 for windows
            at the very end. Methods without such a window do not read it.
    """

    ids: torch.Tensor
    max_new: int
    min_new: int
    stops: list[int]
    plans: list[Plan]
    example_id: str = ""
    sampler: Callable[[torch.Tensor], torch.Tensor] | None = None
    tag: object = None
    template_tail: int = 0


@dataclass
class Timing:
    """Seconds of one generation, device work included; None where the moment is not seen or shared."""

    prefill_s: float | None = 0.0
    decode_s: float | None = 0.0


@dataclass
class RowOutput:
    """One row's generation.

    Attributes:
        tokens: new token ids, stop token included.
        finish: id of the stop token, or "length".
        prompt_bytes: bytes held right after the prompt; None on the `hf` path, where that moment is not seen.
        rows_in_flight: mean rows that decoded together while this one did.
        near_ties: steps of a shared batch whose two largest logits were closer than `NEAR_TIE`.
    """

    plan: Plan
    cache: KVCache
    tokens: list[int] = field(default_factory=list)
    finish: int | str | None = None
    timing: Timing = field(default_factory=Timing)
    prompt_bytes: CacheBytes | None = None
    rows_in_flight: float = 1.0
    near_ties: int = 0


@dataclass
class Counters:
    """What a run did, counted rather than timed."""

    prefills: int = 0
    decode_forwards: int = 0
    decoded_rows: int = 0

    @property
    def mean_rows_in_flight(self) -> float:
        return self.decoded_rows / self.decode_forwards if self.decode_forwards else 0.0


def device_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def forward(
    model: PreTrainedModel, ids: torch.Tensor, cache: AttachedCache, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """One forward of ids (R, t) -> float32 logits (R, V) of the last token; `positions` (R, t) when rows differ."""
    out = model(
        input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache}
    )
    return out.logits[:, -1].float()


@dataclass
class _Live:
    """A row between its prompt and its last token."""

    request: Request
    output: RowOutput
    position: int
    shared: int = 0
    steps: int = 0

    def take(self, token: int) -> bool:
        """Adds a token; whether the row is finished."""
        out = self.output
        out.tokens.append(token)
        if token in self.request.stops:
            out.finish = token
        elif len(out.tokens) == self.request.max_new:
            out.finish = "length"
        return out.finish is not None

    @property
    def cannot_stop(self) -> bool:
        return bool(self.request.stops) and len(self.output.tokens) < self.request.min_new


class Decoder:
    """Keeps up to `batch_size` rows in flight: finished rows leave, prompts come in, one forward moves all rows on.

    A prompt that several methods compress leaves a row for each; with `batch_size` 1 they decode one after the other.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int = 1):
        attachment = get_attachment(model)
        assert attachment is not None
        self.model = model
        self.attachment: Attachment = attachment
        self.batch_size = batch_size
        self.counters = Counters()
        self._live: list[_Live] = []
        self._batch: BatchCache | None = None

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, RowOutput | Exception, Plan]]:
        """Rows as they finish, in no fixed order; an exception stands for a row whose prompt failed."""
        waiting = iter(requests)
        ready: deque[_Live] = deque()  # prefilled rows that have no place yet
        more = True
        while more or ready or self._live:
            entering: list[_Live] = []
            while len(self._live) + len(entering) < self.batch_size and (ready or more):
                if ready:
                    entering.append(ready.popleft())
                    continue
                request = next(waiting, None)
                if request is None:
                    more = False
                    continue
                for row in self._prompt(request):
                    if isinstance(row, _Live):
                        ready.append(row)
                    else:
                        yield row
            self._regroup(list(range(len(self._live))), entering)
            if self._live:
                yield from self._step()

    def _prompt(self, request: Request) -> Iterator[_Live | tuple[Request, RowOutput | Exception, Plan]]:
        """Prefills one request -> live rows, or what is finished (or failed) after its first token already."""
        for plans in self._share_passes(request.plans):
            caches = [
                self.attachment.new_cache(
                    plan,
                    example_id=request.example_id,
                    max_new_tokens=request.max_new,
                    sampler=request.sampler,
                    template_tail=request.template_tail,
                )
                for plan in plans
            ]
            fan = FanOutCache(self.attachment, caches) if len(caches) > 1 else None
            ids = request.ids.to(self.model.device)
            start = device_time(ids.device)
            try:
                logits = forward(self.model, ids[None], fan or caches[0])
            except Exception as error:  # handed to the caller, who knows what it costs
                yield from ((request, error, plan) for plan in plans)
                continue
            seconds = device_time(ids.device) - start
            self.counters.prefills += 1
            if not self.attachment.slots:  # all layers slide: none has asked for the context
                for cache in caches:
                    cache.context(len(ids))
            if fan is not None:
                fan.share_native()
            for i, (plan, cache) in enumerate(zip(plans, caches, strict=True)):
                if fan is not None and i in fan.failures:
                    yield request, fan.failures[i], plan
                    continue
                output = RowOutput(plan, cache, prompt_bytes=cache.bytes(), timing=Timing(seconds, 0.0))
                live = _Live(request, output, position=len(ids))
                [token] = self._choose(logits.clone(), [live])
                yield (request, output, plan) if live.take(token) else live

    def _share_passes(self, plans: list[Plan]) -> list[list[Plan]]:
        """Groups of plans that can compress one prompt pass; methods that change the pass have one of their own."""
        changing = [any(c.changes_prompt for c in self.attachment.clusters(p)) for p in plans]
        sharing = [p for p, changes in zip(plans, changing, strict=True) if not changes]
        alone = [[p] for p, changes in zip(plans, changing, strict=True) if changes]
        return ([sharing] if sharing else []) + alone

    @staticmethod
    def _choose(logits: torch.Tensor, rows: list[_Live]) -> list[int]:
        """Greedy tokens; a row that cannot stop yet takes its best other token."""
        for i, row in enumerate(rows):
            if row.cannot_stop:
                logits[i, row.request.stops] = -torch.inf
        if len(rows) > 1:
            best = logits.topk(2, dim=-1).values
            for row, gap in zip(rows, (best[:, 0] - best[:, 1]).tolist(), strict=True):
                row.output.near_ties += gap < NEAR_TIE
        return logits.argmax(dim=-1).tolist()

    def _regroup(self, staying: list[int], entering: list[_Live]) -> None:
        """Changes who is in flight. One row decodes on its own cache; several share a batch cache."""
        if not entering and len(staying) == len(self._live):
            return
        rows = [self._live[i] for i in staying] + entering
        # A single row keeps being read from the batch it is in; only a row that was alone starts one.
        if self._batch is None and len(rows) > 1:
            self._batch = BatchCache(self.attachment)
            staying, entering = [], rows
        if self._batch is not None:
            slack = max((row.request.max_new - len(row.output.tokens) for row in rows), default=0)
            self._batch.regroup(staying, [row.output.cache for row in entering], slack)
        self._live = rows
        if not rows:
            self._batch = None

    def _step(self) -> Iterator[tuple[Request, RowOutput | Exception, Plan]]:
        """One token for every row in flight -> those that finished, or all with the error of a failed forward."""
        rows, device = self._live, self.model.device
        tokens = torch.tensor([[row.output.tokens[-1]] for row in rows], device=device)
        positions = torch.tensor([[row.position] for row in rows], device=device)
        cache = rows[0].output.cache if self._batch is None else self._batch
        start = time.perf_counter()
        try:
            chosen = self._choose(forward(self.model, tokens, cache, positions), rows)  # tolist() waits for the device
        except Exception as error:
            self._live, self._batch = [], None
            yield from ((row.request, error, row.output.plan) for row in rows)
            return
        seconds = time.perf_counter() - start
        self.counters.decode_forwards += 1
        self.counters.decoded_rows += len(rows)
        finished = []
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            row.position += 1
            row.steps += 1
            row.shared += len(rows)
            timing = row.output.timing
            timing.decode_s = None if len(rows) > 1 or timing.decode_s is None else timing.decode_s + seconds
            if row.take(token):
                finished.append(i)
                row.output.rows_in_flight = row.shared / row.steps
        if finished:
            self._regroup([i for i in range(len(rows)) if i not in finished], [])
        for i in finished:
            yield rows[i].request, rows[i].output, rows[i].output.plan
