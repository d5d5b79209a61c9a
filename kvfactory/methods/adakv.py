from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import PromptContext, RaggedKept
from kvfactory.methods.pyramidkv import PyramidKV
from kvfactory.methods.snapkv import WindowSelector, WindowSettings
from kvfactory.ops.adaptive import (
    as_fraction,
    flat_ranking_counts,
    mix_with_uniform,
    ragged_positions,
    rank_tokens,
    window_means,
)
from kvfactory.ops.budget import pyramid_schedule
from kvfactory.ops.scores import pool_scores
from kvfactory.settings import Cell, setting


@register("AdaKV")
class AdaKV(WindowSelector):
    """SnapKV's selection with a layer's budget shared among its heads by one flat ranking of all their tokens.

    Paper: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550. Code: FFY0/AdaKV,
    adaptive_snapkv/monkeypatch/snapkv_utils.py; Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py
    (AdaKVCluster). Settings: `floor` and `normalize` as in that code, window 8 in the factory and 32 in the paper
    preset; `adakv_pyramid` gives Ada-PyramidKV. Departures: a prompt of exactly the budget is kept whole; the
    pyramid follows every prompt instead of the first one; "exact" rounding and the "min" safeguard (that of
    NVIDIA/kvpress) are options.
    """

    @dataclass(frozen=True)
    class Settings(PyramidKV.Settings):
        window_size: int = setting(
            8,
            WindowSettings.__dataclass_fields__["window_size"].metadata["help"],
            paper=32,
            paper_mark="read",
            authors=Cell(32, "read"),
        )
        floor: float = setting(
            0.2,
            "share of the budget that every head gets before the rest is shared out",
            paper=0.2,
            paper_mark="read",
            authors=Cell(0.2, "read"),
        )
        normalize: bool = setting(
            True,
            "weigh a head's scores by the mass that its best tokens hold, which demotes diffuse heads",
            paper=False,
            paper_mark="read",
            authors=Cell(False, "read"),
        )
        adakv_pyramid: bool = setting(
            False, "Ada-PyramidKV: the layer's budget follows PyramidKV's schedule", authors=Cell(False, "read")
        )
        adakv_rounding: str = setting(
            "round",
            "round as published, or exact: head budgets add up to the layer's",
            choices=("round", "exact"),
            authors=Cell("round", "read"),
        )
        adakv_safeguard: str = setting(
            "mix",
            "mix as published: the floor is blended in; min: a head's best tokens up to the floor come first",
            paper="mix",
            paper_mark="read",
            choices=("mix", "min"),
            authors=Cell("mix", "read"),
        )

        def validate(self, budget: int | None) -> None:
            super().validate(budget)
            if not 0 <= self.floor <= 1:
                raise ValueError(f"--floor {self.floor} is not in [0, 1], the share of the budget that every head gets")
            if not self.adakv_pyramid:
                for name in ("pyramid_beta", "pyramid_rounding", "pyramid_mid_branch"):
                    value = getattr(self, name)
                    if value != type(self).__dataclass_fields__[name].default:
                        raise ValueError(
                            f"--{name} {value} shapes the pyramid over the layers, which AdaKV has with "
                            "--adakv_pyramid on only"
                        )

    capability = Capability(
        stage="prompt-evict",
        budget_means="mean over heads",
        reference="arXiv 2407.11550; FFY0/AdaKV, adaptive_snapkv/monkeypatch/snapkv_utils.py",
    )

    heads_declared = False

    def kept(self, ctx: PromptContext) -> int:
        """Kept tokens on the mean of this layer's heads, window (and template tail) included."""
        s = self.settings
        if not s.adakv_pyramid:
            return min(ctx.budget, ctx.prompt_len)
        tail = ctx.template_tail  # stands outside the schedule, as in PyramidKV
        shape = (s.window_size, ctx.prompt_len - tail, self.shape.num_layers, s.pyramid_beta)
        schedule = pyramid_schedule(ctx.budget - tail, *shape, s.pyramid_rounding, s.pyramid_mid_branch)
        return schedule[self.shape.layer_idx] + tail

    def declared_bounds(self, ctx: PromptContext) -> tuple[int, int]:
        """(least, most) kept tokens of this layer's stored heads together; they differ by rounding alone."""
        total = sum(self.declared(ctx))
        s = self.settings
        if self.kept(ctx) >= ctx.prompt_len or s.adakv_rounding == "exact" or s.adakv_safeguard == "min":
            return total, total
        heads, base = self.stored_heads, self.kept(ctx) - self.window(ctx)
        cut = heads * (base * s.floor - int(base * s.floor))  # the fraction that each head's uniform part loses
        slack = 1e-3  # float32 rounding of the mix
        most = min(total - cut + heads / 2 + slack, heads * ctx.prompt_len)
        return math.ceil(total - cut - heads / 2 - slack), math.floor(most)

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> RaggedKept | None:
        self.check_room(ctx)
        kept = self.kept(ctx)
        if kept >= ctx.prompt_len:
            return None
        window = self.window(ctx)
        ranking = rank_tokens(self.scores(q, k, v, ctx))
        counts = self.counts(ranking.scores, kept - window)
        # On a device the host does not wait for the exact number; what is too much lies behind the last segment.
        most = k.shape[0] * self.declared_bounds(ctx)[1] if k.is_cuda else None
        return RaggedKept(*ragged_positions(ranking.order, counts, window, size=most))

    def counts(self, ranked: torch.Tensor, base: int) -> torch.Tensor:
        """(B, Hs) past tokens of every head from its descending scores (B, Hs, P), `base` on the mean of the heads."""
        s = self.settings
        if s.adakv_safeguard == "mix":
            adaptive = flat_ranking_counts(ranked, base, normalize=s.normalize)
            return mix_with_uniform(adaptive, base, s.floor, s.adakv_rounding)
        protected = int(base * s.floor) if s.adakv_rounding == "round" else int(base * as_fraction(s.floor))
        return flat_ranking_counts(ranked, base, normalize=s.normalize, protected=protected)

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        s = self.settings
        q, k = self.observed(q, ctx), self.observed(k, ctx)
        raw = window_means(q, k, s.window_size, scale=self.scale, score_dtype=s.score_dtype)
        return pool_scores(self.per_stored_head(raw), s.kernel_size, s.pooling)
