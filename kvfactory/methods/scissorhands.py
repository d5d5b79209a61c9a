from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, PromptContext
from kvfactory.methods.evictor import POSITION, Evictor, EvictorSettings, decode_evict_setting
from kvfactory.ops.lottery import draw_positions
from kvfactory.ops.row_statistics import BELOW_AVERAGE, low_weight_counts, lowest_positions, row_normalisers
from kvfactory.ops.select import top_positions
from kvfactory.settings import Cell, setting

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore


@register("Scissorhands")
class Scissorhands(Evictor):
    """Drops the tokens that most of the last queries gave less than an even share of attention.

    Paper: Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test Time,
    arXiv 2305.17118, Algorithm 2. Code: lzcemma/Scissorhands evaluates a simulation without a budget; values from
    AnswerDotAI/cold-compress. The counts of most tokens tie: more attention wins, then the later token. Departures: one
    step at the end of the prompt; every layer gets the same budget.
    """

    @dataclass(frozen=True)
    class Settings(EvictorSettings):
        decode_evict: bool = decode_evict_setting(paper=True, paper_mark="recalled")
        sinks: int = setting(
            0, "first tokens that are always kept, inside the budget", paper=0, factory_mark="recalled"
        )
        scissor_window: int = setting(
            400,
            "last prompt tokens whose queries judge the others",
            paper=400,
            authors=Cell(100, "read"),
            factory_mark="recalled",
        )
        scissor_recent: int = setting(
            10,
            "most recent tokens that are always kept, inside the budget",
            paper=10,
            authors=Cell(10, "read"),
            factory_mark="recalled",
        )
        scissor_score: str = setting(
            "counter",
            "counter: how often a query gives less than an even share; sum: attention received, as in the original "
            "project's selector",
            paper="counter",
            choices=("counter", "sum"),
            factory_mark="recalled",
        )
        scissor_select: str = setting(
            "topk",
            "topk, or prob: tokens are drawn with probabilities from the attention they received",
            paper="topk",
            choices=("topk", "prob"),
            factory_mark="recalled",
        )
        scissor_temperature: float = setting(1.0, "of the draw of scissor_select prob; inf draws evenly")
        scissor_normalize: bool = setting(
            False,
            "divide a token's count by the number of queries that saw it",
            paper=False,
            factory_mark="recalled",
        )
        scissor_drop: float | None = setting(
            None,
            "part of the budget dropped at once when decoding exceeds it; - means one token",
            paper=0.4,
        )

        def validate(self, budget: int | None) -> None:
            if self.sinks < 0:
                raise ValueError(f"--sinks {self.sinks} is negative")
            if self.scissor_window < 1:
                raise ValueError(f"--scissor_window {self.scissor_window} leaves no query to judge: give at least 1")
            if self.scissor_recent < 1:
                raise ValueError(f"--scissor_recent {self.scissor_recent} keeps no recent token: give at least 1")
            if not self.scissor_temperature > 0:
                raise ValueError(f"--scissor_temperature {self.scissor_temperature} must be above 0; inf draws evenly")
            if self.scissor_temperature != 1 and self.scissor_select != "prob":
                raise ValueError(
                    f"--scissor_temperature {self.scissor_temperature} belongs to --scissor_select prob; topk draws "
                    "nothing"
                )
            if self.scissor_normalize and (self.scissor_score != "counter" or self.scissor_select != "topk"):
                raise ValueError(
                    "--scissor_normalize on divides counts: it belongs to --scissor_score counter with "
                    "--scissor_select topk"
                )
            if self.scissor_drop is not None and not 0 < self.scissor_drop < 1:
                raise ValueError(f"--scissor_drop {self.scissor_drop} is not in (0, 1), the part of the budget dropped")
            if budget is not None and self.sinks + self.scissor_recent >= budget:
                raise ValueError(
                    f"--max_capacity_prompts {budget} must be larger than the {self.sinks} sinks (--sinks) and "
                    f"{self.scissor_recent} recent tokens (--scissor_recent) that are kept inside it"
                )

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        randomised=True,
        reference="arXiv 2305.17118, Algorithm 2; lzcemma/Scissorhands",
    )

    def positions(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        s, S = self.settings, ctx.prompt_len
        counts, sums = self.statistics(q, k, ctx)
        free = self.kept(ctx) - s.sinks - s.scissor_recent
        if s.scissor_select == "prob":
            generator = ctx.generator(self.shape.layer_idx)
            best = draw_positions(sums, free, s.scissor_temperature, generator, sampler=ctx.sampler)
        elif s.scissor_score == "sum":
            best = top_positions(sums, free)
        else:
            best = lowest_positions(counts, sums, free)
        first = torch.arange(s.sinks, device=k.device).expand(*best.shape[:2], -1)
        last = torch.arange(S - s.scissor_recent, S, device=k.device).expand(*best.shape[:2], -1)
        return torch.cat([first, best + s.sinks, last], dim=-1)

    def statistics(self, q: torch.Tensor, k: torch.Tensor, ctx: PromptContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts and sums (B, Hs, S - sinks - recent) of the tokens that are not protected, float32.

        Counts are whole numbers except where they are normalised or averaged over a group.
        """
        s, S = self.settings, ctx.prompt_len
        first_row = max(0, S - s.scissor_window)
        counts, sums = low_weight_counts(q, k, scale=self.scale, first_row=first_row)
        inner = slice(s.sinks, S - s.scissor_recent)
        counts, sums = self.per_stored_head(counts[..., inner].float()), self.per_stored_head(sums[..., inner])
        if s.scissor_normalize:  # after the group, whose sum of whole numbers is exact: equal counts must stay equal
            counts = counts / (S - torch.arange(S, device=k.device)[inner].clamp_min(first_row))
        return counts, sums

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S - sinks - recent): attention received, the ranking of scissor_score sum."""
        return self.statistics(q, k, ctx)[1]

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        kept = super().compress(q, k, v, ctx)
        if kept is None or not self.evicts:
            return kept
        # Rings of the last queries with their normalisers reproduce the weights of past steps on what is still stored.
        S, w = ctx.prompt_len, self.settings.scissor_window
        first = max(0, S - w)
        rows = torch.arange(first, S, device=k.device)
        normaliser = row_normalisers(q, k, scale=self.scale, first_row=first)
        kept.history = {
            "query": _ring(q[:, :, first:].float(), rows, w, dim=2),
            "normaliser": _ring(normaliser, rows, w, dim=2),
            "row": _ring(rows, rows, w, dim=0, empty=-1),
            "visible": _ring(rows + 1, rows, w, dim=0),
        }
        return kept

    def observe(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        """Puts the newest query into the ring, in place of the oldest."""
        k, _ = store.view()
        B, Hs, n, D = k.shape
        place = position % self.settings.scissor_window
        logits = (q.float().reshape(B, Hs, -1, D) @ k.float().transpose(2, 3)) * self.scale
        store.history["query"][:, :, place] = q[:, :, 0].float()
        store.history["normaliser"][:, :, place] = logits.logsumexp(dim=-1).view(B, -1)
        store.history["row"][place] = position
        store.history["visible"][place] = n

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        """The slots that most of the last queries gave little; among equal counts less attention, then the older."""
        s = self.settings
        positions = store.column(POSITION)
        counts, sums = self.ring_statistics(store)
        if s.scissor_score == "sum":
            counts = torch.zeros_like(counts)
        protected = (positions > position - s.scissor_recent) | (positions < s.sinks)
        counts = counts.masked_fill(protected, -1)
        order = positions.argsort(dim=-1)
        for key, descending in ((sums, False), (counts, True)):
            order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, descending=descending, stable=True))
        drop = 1 if s.scissor_drop is None else max(1, int(s.scissor_drop * ctx.budget))
        return order[..., : min(drop, store.length - s.sinks - s.scissor_recent)]

    def ring_statistics(self, store: DenseStore) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, Hs, n) counts and sums over the ring's queries; a query knows nothing of tokens that came after it."""
        k, _ = store.view()
        B, Hs, n, D = k.shape
        ring, row = store.history["query"], store.history["row"]
        Hq, w = ring.shape[1:3]
        logits = (ring.reshape(B, Hs, -1, D) @ k.float().transpose(2, 3)).view(B, Hq, w, n) * self.scale
        weight = (logits - store.history["normaliser"][..., None]).exp()
        seen = store.column(POSITION).repeat_interleave(Hq // Hs, dim=1)[:, :, None] <= row[:, None]
        weight = weight * seen
        low = (weight * store.history["visible"][:, None] < BELOW_AVERAGE) & seen
        counts, sums = low.sum(dim=2).float(), weight.sum(dim=2)
        if self.settings.scissor_normalize:
            counts = counts / seen.sum(dim=2).clamp_min(1)
        return self.per_stored_head(counts), self.per_stored_head(sums)


def _ring(values: torch.Tensor, rows: torch.Tensor, size: int, dim: int, empty: int = 0) -> torch.Tensor:
    """A ring of `size` places along `dim`, the value of row i at place i modulo `size`; free places hold `empty`."""
    shape = list(values.shape)
    shape[dim] = size
    return values.new_full(shape, empty).index_copy_(dim, rows % size, values)
