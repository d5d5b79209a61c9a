from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, PromptContext, TokenSelector
from kvfactory.ops.scores import pool_scores, window_scores
from kvfactory.settings import Cell, MethodSettings, setting


@dataclass(frozen=True)
class WindowSettings(MethodSettings):
    """Settings of every method that ranks prompt tokens by the attention of an observation window."""

    window_size: int = setting(
        8, "last prompt tokens: their queries score the others, and they are always kept", paper=32, paper_mark="read"
    )
    kernel_size: int = setting(
        7, "width of the pooling over neighbouring tokens, odd", paper=7, paper_mark="read", authors=Cell(7, "read")
    )
    pooling: str = setting(
        "maxpool",
        "how neighbouring scores are pooled",
        paper="maxpool",
        paper_mark="read",
        choices=("maxpool", "avgpool"),
        authors=Cell("maxpool", "read"),
    )
    score_dtype: str = setting(
        "float32", "precision of scores; model reproduces half-precision rounding", choices=("float32", "model")
    )

    def validate(self, budget: int | None) -> None:
        check_window(self.window_size, budget)
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"--kernel_size {self.kernel_size} must be odd and positive, so that pooling keeps positions"
            )


def check_window(window: int, budget: int | None) -> None:
    """A window holds at least one token and leaves room in the budget for at least one other."""
    if window < 1:
        raise ValueError(f"--window_size {window} observes nothing: give at least 1")
    if budget is not None and budget <= window:
        raise ValueError(
            f"--max_capacity_prompts {budget} must be larger than the window of {window} tokens that is kept inside it "
            "(--window_size)"
        )


class WindowSelector(TokenSelector):
    """Base of the methods whose scores come from an observation window of `settings.window_size` queries.

    The window ends where the prompt's template tail begins, by default at the end of the prompt. Tokens before the
    window compete; window and tail are always kept.
    """

    def window(self, ctx: PromptContext) -> int:
        """How many of the last prompt tokens are always kept: the observation window and the template behind it."""
        return self.settings.window_size + ctx.template_tail

    def observed(self, x: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """q, k or v (B, H, S, D) up to the end of the observation window; a view."""
        return x[:, :, : ctx.prompt_len - ctx.template_tail]

    def check_room(self, ctx: PromptContext) -> None:
        """Raises ValueError when a template tail leaves no room in the budget of a prompt that is above it."""
        if ctx.template_tail and ctx.budget < ctx.prompt_len and ctx.budget <= self.window(ctx):
            raise ValueError(
                f"--window_skip_template on keeps {ctx.template_tail} template tokens and the window of "
                f"{self.settings.window_size} tokens before them (--window_size) inside the budget, and "
                f"--max_capacity_prompts {ctx.budget} leaves no room for any other of this prompt's {ctx.prompt_len} "
                f"tokens: give at least {self.window(ctx) + 1}"
            )

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        self.check_room(ctx)
        return super().compress(q, k, v, ctx)


@register("SnapKV")
class SnapKV(WindowSelector):
    """Keeps what the last prompt tokens attend to, pooled so that neighbours of a hit survive, plus those tokens.

    Paper: SnapKV: LLM Knows What You are Looking for Before Generation, arXiv 2404.14469. Code:
    FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py. Departure: window 8 instead of 32 in the factory
    preset, as in Zefan-Cai/KVCache-Factory; at kv_head granularity scores are reduced over a group before pooling.
    """

    @dataclass(frozen=True)
    class Settings(WindowSettings):
        pass

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        reference="arXiv 2404.14469; FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py",
    )

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        s = self.settings
        q, k = self.observed(q, ctx), self.observed(k, ctx)
        raw = window_scores(q, k, s.window_size, scale=self.scale, score_dtype=s.score_dtype)
        return pool_scores(self.per_stored_head(raw), s.kernel_size, s.pooling)
