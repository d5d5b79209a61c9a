from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, LayerShape, PromptContext
from kvfactory.methods.evictor import POSITION, Evictor, EvictorSettings, decode_evict_setting, lowest_slot
from kvfactory.ops.select import top_positions, with_window
from kvfactory.settings import Cell, MethodSettings, setting

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore


@register("L2Norm")
class L2Norm(Evictor):
    """Keeps the keys of smallest L2 norm, which correlate with high attention; the first layers stay whole.

    Paper: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430. Code:
    alessiodevoto/l2compress. The skipped layers hold the whole prompt, so the real mean budget is larger than the
    nominal one; rows report it.
    """

    @dataclass(frozen=True)
    class Settings(EvictorSettings):
        skip_layers: tuple[int, ...] = setting(
            (0, 1),
            "layers that are not compressed, counted among the full-attention layers",
            paper=(0, 1),
            authors=Cell((0, 1), "read"),
        )
        decode_evict: bool = decode_evict_setting(paper=False)
        l2_recent: int = setting(0, "most recent tokens that are always kept, inside the budget")
        l2_equalize: bool = setting(
            False, "lower the other layers' budget so that the mean over all layers is the nominal one"
        )

        def validate(self, budget: int | None) -> None:
            if any(layer < 0 for layer in self.skip_layers):
                raise ValueError(f"--skip_layers {','.join(map(str, self.skip_layers))} holds a negative layer")
            if self.l2_recent < 0:
                raise ValueError(f"--l2_recent {self.l2_recent} is negative")
            if budget is not None and budget <= self.l2_recent:
                raise ValueError(f"--max_capacity_prompts {budget} must be larger than --l2_recent {self.l2_recent}")

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        same_for_all_heads=True,
        reads_queries=False,
        reference="arXiv 2406.11430; alessiodevoto/l2compress, l2compress/compress_fn.py",
    )

    @classmethod
    def check_model(cls, settings: MethodSettings, shape: LayerShape, model: str | None = None) -> None:
        """Refuses skipped layers that the model does not have, or that leave none to compress.

        The default is not a choice of layers and passes: a model of two layers is then stored whole, as rows show.
        """
        skipped, layers = settings.skip_layers, shape.num_layers
        if skipped == cls.Settings().skip_layers:
            return
        given = f"--skip_layers {','.join(map(str, skipped))}"
        if len(set(skipped) & set(range(layers))) == layers:
            raise ValueError(f"{given} skips all {layers} full-attention layers of the model: nothing is compressed")
        if skipped and max(skipped) >= layers:
            raise ValueError(
                f"{given} holds layer {max(skipped)}, the model has {layers} full-attention layers, from 0 to "
                f"{layers - 1}"
            )

    def kept(self, ctx: PromptContext) -> int:
        skipped = {layer for layer in self.settings.skip_layers if layer < self.shape.num_layers}
        if self.shape.layer_idx in skipped or ctx.prompt_len <= ctx.budget:
            return ctx.prompt_len
        if not self.settings.l2_equalize:
            return ctx.budget
        others = self.shape.num_layers - len(skipped)
        share = (self.shape.num_layers * ctx.budget - len(skipped) * ctx.prompt_len) // others
        if share <= self.settings.l2_recent:
            raise ValueError(
                f"--l2_equalize leaves {share} tokens per layer for a prompt of {ctx.prompt_len} tokens at a budget of "
                f"{ctx.budget}: the skipped layers already hold more; raise the budget or set --skip_layers none"
            )
        return share

    def limit(self, ctx: PromptContext) -> int | None:
        if self.shape.layer_idx in self.settings.skip_layers:
            return None
        return self.kept(ctx) if ctx.prompt_len > ctx.budget else ctx.budget

    def window(self, ctx: PromptContext) -> int:
        return self.settings.l2_recent

    def positions(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        recent = self.settings.l2_recent
        norms = key_norms(k[:, :, : ctx.prompt_len - recent])
        return with_window(top_positions(-norms, self.kept(ctx) - recent), ctx.prompt_len, recent)

    def columns(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: Kept, ctx: PromptContext
    ) -> dict[str, torch.Tensor]:
        norms = key_norms(k)
        return {"norm": norms.gather(-1, kept.indices)}

    def observe(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        newest = store.view()[0][:, :, -1]
        store.column("norm")[..., -1] = key_norms(newest)

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        positions = store.column(POSITION)
        recent = positions > position - self.settings.l2_recent
        return lowest_slot(-store.column("norm"), positions, recent)


def key_norms(k: torch.Tensor) -> torch.Tensor:
    """L2 norms along the last dim, in float32 or better."""
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.promote_types(k.dtype, torch.float32))
