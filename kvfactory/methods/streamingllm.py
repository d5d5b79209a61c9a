from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, PromptContext
from kvfactory.methods.evictor import POSITION, Evictor, EvictorSettings
from kvfactory.ops.rope import rotate
from kvfactory.ops.select import gather_tokens, with_window
from kvfactory.settings import Cell, setting

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore


@register("StreamingLLM")
class StreamingLLM(Evictor):
    """Keeps the first tokens (attention sinks) and the most recent ones; no scores.

    Paper: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453. Code: mit-han-lab/streaming-llm,
    streaming_llm/kv_cache.py. The factory preset prefills with full attention, cuts once and keeps the RoPE of original
    positions, as in Zefan-Cai/KVCache-Factory; the paper preset also evicts while decoding and re-indexes positions.
    Departure of both: the prompt pass is dense, so kept tokens have seen dropped ones.
    """

    @dataclass(frozen=True)
    class Settings(EvictorSettings):
        sinks: int | None = setting(
            None,
            "first tokens that are always kept, inside the budget; 4 when neither it nor window_size is given",
            paper=None,
            paper_mark="read",
            authors=Cell(4, "read"),
        )
        window_size: int | None = setting(
            None, "most recent tokens kept, inside the budget; the budget minus the sinks when not given"
        )

        reindex_positions: bool = setting(
            False,
            "rotate the sinks so that they directly precede the recent tokens, as positions inside the cache",
            paper=True,
            paper_mark="read",
            authors=Cell(True, "read"),
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

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        kept = super().compress(q, k, v, ctx)
        sinks = self.settings.split(ctx.budget)
        if kept is None or not self.settings.reindex_positions or not sinks:
            return kept
        if self.inv_freq is None:
            raise ValueError(
                "--reindex_positions on rotates cached keys, which needs rotary frequencies that do not change with "
                "the length; use --reindex_positions off for this model"
            )
        keys = gather_tokens(k, kept)
        if self.evicts:
            kept.history["sinks"] = keys[:, :, :sinks].to(torch.float32, copy=True)  # float() alone may be a view
        keys[:, :, :sinks] = rotate(keys[:, :, :sinks], ctx.prompt_len - keys.shape[2], self.inv_freq)
        kept.keys = keys
        return kept

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        """The oldest token behind the sinks."""
        positions = store.column(POSITION)
        sink = positions < self.settings.split(ctx.budget)
        return positions.masked_fill(sink, position + 1).argmin(dim=-1, keepdim=True)

    def evict(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        super().evict(q, store, position, ctx)
        dropped = position + 1 - store.length
        if dropped and "sinks" in store.history:
            # Recent tokens and queries keep their true positions; only distances matter, so the few sinks follow.
            sinks = store.history["sinks"]
            keys, _ = store.view()
            keys[:, :, : sinks.shape[2]] = rotate(sinks, dropped, self.inv_freq).to(keys.dtype)
