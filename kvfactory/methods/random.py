from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import PromptContext, TokenSelector
from kvfactory.methods.snapkv import check_window
from kvfactory.settings import MethodSettings, setting


@register("Random")
class Random(TokenSelector):
    """Control: keeps random prompt tokens plus the most recent ones. A method that does not beat it selects nothing.

    Every stored head draws on its own, from a generator made of (seed, example, layer). No paper; our own control.
    """

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        window_size: int = setting(8, "most recent tokens kept, inside the budget")

        def validate(self, budget: int | None) -> None:
            check_window(self.window_size, budget)

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        reads_queries=False,
        randomised=True,
        reference="control, no paper",
    )

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        shape = (k.shape[0], self.stored_heads, ctx.prompt_len - self.settings.window_size)
        return torch.rand(shape, generator=ctx.generator(self.shape.layer_idx)).to(k.device)
