from __future__ import annotations

from dataclasses import dataclass

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import PromptContext
from kvfactory.methods.snapkv import SnapKV, WindowSettings
from kvfactory.ops.budget import pyramid_schedule
from kvfactory.settings import Cell, setting


@register("PyramidKV")
class PyramidKV(SnapKV):
    """SnapKV's selection with more budget for lower layers: an arithmetic sequence over the layers.

    Paper: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069. Code:
    Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py. Floor rounding exceeds the nominal budget by up to
    (layers - 2) / 2 tokens on the mean of the layers; rows and tables report what was really kept.
    """

    @dataclass(frozen=True)
    class Settings(WindowSettings):
        window_size: int = setting(
            8,
            WindowSettings.__dataclass_fields__["window_size"].metadata["help"],
            paper=8,
            paper_mark="read",
            authors=Cell(8, "read"),
        )
        pyramid_beta: int = setting(
            20,
            "steepness: the top layer gets 1/beta of the mean past budget",
            paper=20,
            paper_mark="read",
            authors=Cell(20, "read"),
        )
        pyramid_rounding: str = setting(
            "floor",
            "floor as published, or exact: layer budgets add up to the nominal total",
            choices=("floor", "exact"),
        )
        pyramid_mid_branch: str = setting(
            "uniform",
            "prompts shorter than twice the past budget: uniform as published, or pyramid",
            choices=("uniform", "pyramid"),
        )

        def validate(self, budget: int | None) -> None:
            super().validate(budget)
            if self.pyramid_beta < 1:
                raise ValueError(f"--pyramid_beta {self.pyramid_beta} must be at least 1")

    capability = Capability(
        stage="prompt-evict",
        budget_means="mean over layers",
        reference="arXiv 2406.02069; Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py",
    )

    def kept(self, ctx: PromptContext) -> int:
        s = self.settings
        tail = ctx.template_tail  # stands outside the schedule, which sees the prompt without it
        schedule = pyramid_schedule(
            ctx.budget - tail,
            s.window_size,
            ctx.prompt_len - tail,
            self.shape.num_layers,
            s.pyramid_beta,
            s.pyramid_rounding,
            s.pyramid_mid_branch,
        )
        return schedule[self.shape.layer_idx] + tail
