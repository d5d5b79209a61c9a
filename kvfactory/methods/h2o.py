from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, PromptContext
from kvfactory.methods.evictor import POSITION, Evictor, EvictorSettings, lowest_slot
from kvfactory.methods.snapkv import check_window
from kvfactory.ops.scores import column_sums, fused_scores
from kvfactory.ops.select import top_positions, with_window
from kvfactory.settings import Cell, setting

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore


@register("H2O")
class H2O(Evictor):
    """Keeps heavy hitters, the tokens that received most attention from all prompt queries, plus the most recent ones.

    Paper: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models, arXiv 2306.14048. Code:
    FMInference/H2O, h2o_hf/utils_real_drop. The column sums run over row blocks, so no S x S matrix exists.
    """

    @dataclass(frozen=True)
    class Settings(EvictorSettings):
        window_size: int | None = setting(
            8,
            "most recent tokens kept, inside the budget; - means half of the budget",
            paper=None,
            paper_mark="read",
            authors=Cell("half of the budget", "read"),
        )
        score_dtype: str = setting(
            "float32", "precision of scores; model reproduces half-precision rounding", choices=("float32", "model")
        )

        def validate(self, budget: int | None) -> None:
            if self.window_size is not None:
                check_window(self.window_size, budget)
            elif budget is not None and budget < 2:
                raise ValueError(f"--max_capacity_prompts {budget} cannot be halved into heavy and recent tokens")

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        reference="arXiv 2306.14048; FMInference/H2O, h2o_hf/utils_real_drop",
    )

    def window(self, ctx: PromptContext) -> int:
        given = self.settings.window_size
        return ctx.budget - ctx.budget // 2 if given is None else given

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        return self.received(q, k, ctx)[..., : ctx.prompt_len - self.window(ctx)]

    def wants_lse(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        return self.settings.score_dtype == "float32" and fused_scores(q, k) is not None

    def received(self, q: torch.Tensor, k: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S) attention that every token received from all prompt queries."""
        sums = column_sums(q, k, scale=self.scale, score_dtype=self.settings.score_dtype, lse=ctx.lse)
        return self.per_stored_head(sums)

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        if not self.evicts:
            return super().compress(q, k, v, ctx)
        received = self.received(q, k, ctx)
        S, window = ctx.prompt_len, self.window(ctx)
        if self.kept(ctx) < S:
            best = top_positions(received[..., : S - window], self.kept(ctx) - window)
            indices = with_window(best, S, window)
        else:
            indices = torch.arange(S, device=k.device).expand(k.shape[0], self.stored_heads, S)
        return Kept(indices, columns={POSITION: indices.int(), "received": received.gather(-1, indices).float()})

    def observe(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        received = store.column("received")
        received[..., -1] = 0
        received += self.step_attention(q, store)

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        positions = store.column(POSITION)
        recent = positions > position - self.window(ctx)
        return lowest_slot(store.column("received"), positions, recent)
