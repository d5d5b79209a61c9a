from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import PromptContext, TokenSelector
from kvfactory.ops.select import with_window
from kvfactory.settings import Cell, MethodSettings, setting


@register("StreamingLLM")
class StreamingLLM(TokenSelector):
    """Keeps the first tokens (attention sinks) and the most recent ones; no scores.

    Paper: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. Code: mit-han-lab/streaming-llm,
    streaming_llm/kv_cache.py. Departures: the prompt is prefilled with full attention and then cut, and keys keep the
    RoPE of their original position, both as in Zefan-Cai/KVCache-Factory.
    """

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        sinks: int | None = setting(
            None,
            "first tokens that are always kept, inside the budget; 4 when neither it nor window_size is given",
            authors=Cell(4, "read"),
        )
        window_size: int | None = setting(
            None, "most recent tokens kept, inside the budget; the budget minus the sinks when not given"
        )

        def validate(self, budget: int | None) -> None:
            if self.sinks is not None and self.sinks < 0:
                raise ValueError(f"--sinks {self.sinks} is negative")
            if self.window_size is not None and self.window_size < 1:
                raise ValueError(f"--window_size {self.window_size} keeps no recent token: give at least 1")
            if budget is None:
                return
            sinks = self.split(budget)
            if not 0 <= sinks < budget:
                raise ValueError(
                    f"--max_capacity_prompts {budget} leaves no room for StreamingLLM's "
                    f"{'sinks' if self.window_size is None else 'window'} of "
                    f"{sinks if self.window_size is None else self.window_size}: give a larger budget"
                )
            if None not in (self.sinks, self.window_size) and self.sinks + self.window_size != budget:
                raise ValueError(
                    f"--sinks {self.sinks} and --window_size {self.window_size} do not add up to "
                    f"--max_capacity_prompts {budget}: give one of the two"
                )

        def split(self, budget: int) -> int:
            """Sinks within a budget."""
            if self.sinks is not None:
                return self.sinks
            return 4 if self.window_size is None else budget - self.window_size

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        same_for_all_heads=True,
        reads_queries=False,
        reference="arXiv 2309.17453; mit-han-lab/streaming-llm, streaming_llm/kv_cache.py",
    )

    def positions(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        sinks = self.settings.split(ctx.budget)
        first = torch.arange(sinks, device=k.device).expand(k.shape[0], self.stored_heads, sinks)
        return with_window(first, ctx.prompt_len, ctx.budget - sinks)
