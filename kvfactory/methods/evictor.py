"""Decode-time eviction: after every step the store is back at its budget.

A step appends the new token, attends to everything stored, and drops what exceeds the budget. Shapes do not depend on
values, so nothing is asked of the device: the last slot takes the victim's place, and columns (one number per slot,
such as its position or its accumulated attention) move along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfactory.methods.base import Kept, PromptContext, TokenSelector
from kvfactory.ops.scores import reduce_groups
from kvfactory.settings import MethodSettings, setting

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore

POSITION = "position"


def decode_evict_setting(paper: bool, paper_mark: str = "read"):
    """The switch that every method with decode-time eviction has."""
    return setting(
        False,
        "evict at every decode step too, so that the cache never exceeds the budget",
        paper=paper,
        paper_mark=paper_mark,
    )


@dataclass(frozen=True)
class EvictorSettings(MethodSettings):
    """Base of settings with `decode_evict`."""

    decode_evict: bool = decode_evict_setting(paper=True)


class Evictor(TokenSelector):
    """A token selector that may also evict while decoding.

    Subclasses define `columns` (what each slot carries from the prompt), `observe` (what a step adds to it) and
    `victims`.
    """

    @property
    def evicts(self) -> bool:
        return self.settings.decode_evict

    def limit(self, ctx: PromptContext) -> int | None:
        """Slots that stay after a step; None where this layer never evicts."""
        return ctx.budget

    def declared(self, ctx: PromptContext) -> list[int]:
        # Heads will choose differently while decoding, so they are stored apart from the start.
        if self.evicts and self.limit(ctx) is not None:
            return [self.kept(ctx)] * self.stored_heads
        return super().declared(ctx)

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        if not self.evicts or self.limit(ctx) is None:
            return super().compress(q, k, v, ctx)
        S = ctx.prompt_len
        if self.kept(ctx) < S:
            kept = self.select_prompt(q, k, v, ctx)
        else:
            kept = Kept(torch.arange(S, device=k.device).expand(k.shape[0], self.stored_heads, S))
        kept.columns = {POSITION: kept.indices.int(), **self.columns(q, k, v, kept, ctx)}
        return kept

    def select_prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept:
        """What the prompt-time selection keeps."""
        return super().compress(q, k, v, ctx)

    def columns(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Kept, ctx: PromptContext
    ) -> dict[str, torch.Tensor]:
        """(B, Hs, n) numbers that the kept slots carry into decoding, besides their positions."""
        return {}

    def observe(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        """Updates the columns after a step with q (B, Hq, 1, D); the new token is the last slot."""

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, m) distinct slots to drop, the same m for every head."""
        raise NotImplementedError(f"{self.name} must define victims()")

    def evict(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        """Called after the attention of the token at `position`, whose keys are the last slot."""
        if POSITION not in store.columns:
            return
        store.column(POSITION)[..., -1] = position
        self.observe(q, store, position, ctx)
        if store.length > self.limit(ctx):
            store.drop(self.victims(store, position, ctx))

    def step_attention(self, q: torch.Tensor, store: DenseStore) -> torch.Tensor:
        """(B, Hs, n) float32 attention of the newest token over all slots, reduced over each group at kv heads."""
        k, _ = store.view()
        B, Hs, n, D = k.shape
        folded = q.float().reshape(B, Hs, -1, D)
        probs = torch.softmax((folded @ k.float().transpose(2, 3)) * self.scale, dim=-1)
        if Hs == self.shape.num_heads:
            return probs.view(B, Hs, n)
        return reduce_groups(probs.reshape(B, -1, n), Hs, self.gqa_score_agg)


def lowest_slot(score: torch.Tensor, position: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
    """(B, Hs, 1) slot of the smallest score outside `protected`; equal scores: the later position goes.

    Args:
        score: (B, Hs, n) float; position: (B, Hs, n) int32, distinct; protected: (B, Hs, n) bool, not all true.
    """
    score = score.masked_fill(protected, torch.inf)
    tied = score == score.amin(dim=-1, keepdim=True)
    return position.masked_fill(~tied, -1).argmax(dim=-1, keepdim=True)
