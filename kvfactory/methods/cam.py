from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import Kept, PromptContext
from kvfactory.methods.evictor import POSITION, Evictor, lowest_slot
from kvfactory.methods.snapkv import check_window
from kvfactory.ops.cam_merge import (
    banded_probabilities,
    evicted_probabilities,
    merge_banded,
    merge_evicted,
    merge_loop,
)
from kvfactory.ops.scores import attention_rows, column_sums, reduce_groups
from kvfactory.ops.select import gather_tokens, top_positions, with_window
from kvfactory.settings import Cell, MethodSettings, setting

PAPER_SPAN = 32

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore


@register("CAM")
class CAM(Evictor):
    """Keeps what the window attends to, and merges values of other tokens into later ones by random draws.

    Paper: CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024. Code: zyxxmu/cam,
    cam/utils_hh/modify_llama_cam.py; Zefan-Cai/KVCache-Factory, pyramidkv/pyramidkv_utils.py (CAMKVCluster). The
    factory form smooths the values of all tokens behind the first tenth, kept or not, and the prompt's own attention
    sees the smoothed values (`cam_leak`); the paper's form merges only evicted tokens, into kept ones. Departures:
    draws come from a generator of (seed, example, layer); the loop over tokens is a banded triangular solve.
    """

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        window_size: int = setting(8, "last prompt tokens: their queries score the others, and they are always kept")
        cam_variant: str = setting(
            "factory",
            "factory: all values are smoothed; paper_prompt: evicted tokens are merged into kept ones at the prompt's "
            "end; paper: the same, and at every decode step",
            paper="paper",
            choices=("factory", "paper_prompt", "paper"),
        )
        cam_leak: bool | None = setting(
            None, "whether the prompt's attention sees the merged values; - means on in the factory form, off otherwise"
        )
        cam_start_ratio: float = setting(
            0.1, "first part of the prompt that is never merged, factory form", authors=Cell(0.1, "read")
        )
        cam_span: int | None = setting(
            None,
            f"tokens that one value is spread over; - means the window in the factory form, {PAPER_SPAN} otherwise",
            paper=None,
            paper_mark="read",
            authors=Cell(32, "read"),
        )
        cam_cascade: bool = setting(
            True, "whether merged values are merged on, factory form", authors=Cell(True, "read")
        )
        cam_exact_loop: bool = setting(
            False, "merge token by token with the original's rounding, for comparisons; slow, factory form"
        )
        decode_evict: bool | None = setting(
            None, "evict at every decode step too, paper form only; - means on in the paper form, off otherwise"
        )
        score_dtype: str = setting(
            "float32", "precision of scores; model reproduces half-precision rounding", choices=("float32", "model")
        )

        @property
        def smooths(self) -> bool:
            """Whether this is the factory form."""
            return self.cam_variant == "factory"

        @property
        def leaks(self) -> bool:
            return self.smooths if self.cam_leak is None else self.cam_leak

        @property
        def span(self) -> int:
            if self.cam_span is not None:
                return self.cam_span
            return self.window_size if self.smooths else PAPER_SPAN

        def validate(self, budget: int | None) -> None:
            check_window(self.window_size, budget)
            if not 0 <= self.cam_start_ratio <= 1:
                raise ValueError(f"--cam_start_ratio {self.cam_start_ratio} is not in [0, 1], a part of the prompt")
            if self.span < 1:
                raise ValueError(f"--cam_span {self.cam_span} merges into nothing: give at least 1")
            if self.decode_evict and self.cam_variant != "paper":
                raise ValueError(
                    f"--decode_evict on belongs to --cam_variant paper; {self.cam_variant} merges at the prompt only"
                )
            if self.smooths:
                if self.span > self.window_size:
                    raise ValueError(
                        f"--cam_span {self.cam_span} must not exceed --window_size {self.window_size} in the factory "
                        "form, or the last tokens merged would reach beyond the prompt"
                    )
                if self.cam_exact_loop and not self.cam_cascade:
                    raise ValueError(
                        "--cam_exact_loop on is the original's loop, which cascades: drop --cam_cascade off"
                    )
                return
            for name, default in (("cam_start_ratio", 0.1), ("cam_cascade", True), ("cam_exact_loop", False)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"--{name} belongs to --cam_variant factory; {self.cam_variant} merges every evicted token"
                    )
            if self.leaks:
                raise ValueError(
                    f"--cam_leak on belongs to --cam_variant factory; {self.cam_variant} leaves the prompt pass alone"
                )

    capability = Capability(
        stage="prompt-evict",
        budget_means="slots per head",
        randomised=True,
        reference="CaM, ICML 2024; zyxxmu/cam, cam/utils_hh/modify_llama_cam.py",
    )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # (v, mean attention, merged values) of `before_attend`, until `compress` takes them: one draw, not two.
        self._leaked: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def changes_prompt(self) -> bool:
        return self.settings.leaks

    @property
    def evicts(self) -> bool:
        given = self.settings.decode_evict
        return self.settings.cam_variant == "paper" if given is None else given

    def before_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the prompt's attention reads: with the leak, values are merged already.

        Returns:
            k, v (B, Hs, S, D); the tensors given where nothing leaks.
        """
        self._leaked = None
        if not self.settings.leaks or self.kept(ctx) >= ctx.prompt_len:
            return k, v
        attention = self._mean_attention(q, k, ctx)
        merged = self._smooth(v, attention, ctx)
        self._leaked = (v, attention, merged)
        return k.repeat_interleave(merged.shape[1] // k.shape[1], dim=1), merged

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        leaked, self._leaked = self._leaked, None
        if self.evicts:
            return self._compress_for_decoding(q, k, v, ctx)
        if self.kept(ctx) >= ctx.prompt_len:
            return None
        from_leak = leaked is not None and (v is leaked[0] or v is leaked[2])
        attention = leaked[1] if from_leak else self._mean_attention(q, k, ctx)
        kept = self._best(attention, ctx)
        if self.settings.smooths:
            merged = leaked[2] if from_leak else self._smooth(v, attention, ctx)
            return Kept(kept, values=gather_tokens(merged, kept))
        return self._merge_evicted(v, attention, kept, ctx)

    def _merge_evicted(self, v: torch.Tensor, attention: torch.Tensor, kept: torch.Tensor, ctx: PromptContext) -> Kept:
        """The paper's merge at the prompt's end."""
        span = self.settings.span
        draws = self._draw(evicted_probabilities(attention, kept, span), ctx)
        return Kept(kept, values=merge_evicted(v, kept, draws, span))

    def _compress_for_decoding(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept:
        """The prompt's part of the paper form: what is kept also carries the attention it has received so far."""
        S = ctx.prompt_len
        if self.kept(ctx) < S:
            attention = self._mean_attention(q, k, ctx)
            kept = self._merge_evicted(v, attention, self._best(attention, ctx), ctx)
        else:
            kept = Kept(torch.arange(S, device=k.device).expand(k.shape[0], self.stored_heads, S))
        total = column_sums(q, k, scale=self.scale, score_dtype=self.settings.score_dtype)
        received = self.per_stored_head(total).gather(-1, kept.indices).float()
        kept.columns = {POSITION: kept.indices.int(), "received": received}
        return kept

    def observe(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        received = store.column("received")
        received[..., -1] = 0
        received += self.step_attention(q, store)

    def victims(self, store: DenseStore, position: int, ctx: PromptContext) -> torch.Tensor:
        """The token that received least outside the window; its value is merged into the next kept ones first."""
        positions, received = store.column(POSITION), store.column("received")
        victim = lowest_slot(received, positions, positions > position - self.settings.window_size)
        self._merge_victim(store, victim, position, ctx)
        return victim

    def _merge_victim(self, store: DenseStore, victim: torch.Tensor, position: int, ctx: PromptContext) -> None:
        """Adds v / m to the next m = `cam_span` kept tokens with probability clamp(a / mean of theirs, 0, 1)."""
        positions, received = store.column(POSITION), store.column("received")
        later = positions > positions.gather(-1, victim)
        rank = positions.masked_fill(~later, torch.iinfo(positions.dtype).max).argsort(dim=-1).argsort(dim=-1)
        targets = later & (rank < self.settings.span)
        m = targets.sum(dim=-1, keepdim=True)
        theirs = (received * targets).sum(dim=-1, keepdim=True) / m
        probability = (received.gather(-1, victim) / theirs).nan_to_num(0.0).clamp(0, 1)
        if ctx.sampler is not None:
            drawn = ctx.sampler(probability).to(probability)
        else:
            generator = ctx.generator(self.shape.layer_idx, step=position)
            drawn = (
                torch.rand(probability.shape[1:], generator=generator).to(probability.device) < probability
            ).float()
        _, v = store.view()
        value = v.gather(2, victim[..., None].expand(-1, -1, -1, v.shape[-1])).float()
        v += ((targets * (drawn / m))[..., None] * value).to(v.dtype)

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        return self._mean_attention(q, k, ctx)[..., : ctx.prompt_len - self.settings.window_size]

    def _mean_attention(self, q: torch.Tensor, k: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S) attention of the window's queries to every prompt token, averaged over the window."""
        s, S = self.settings, ctx.prompt_len
        rows = attention_rows(q, k, S - s.window_size, S, scale=self.scale, score_dtype=s.score_dtype)
        if self.stored_heads != self.shape.num_heads:
            # Reduced row by row, before the mean: with max it matters, and the original has this order.
            rows = reduce_groups(rows.flatten(2), self.stored_heads, self.gqa_score_agg).unflatten(2, (-1, S))
        return rows.mean(dim=2)

    def _best(self, attention: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, kept) ascending positions."""
        window = self.settings.window_size
        best = top_positions(attention[..., : ctx.prompt_len - window], self.kept(ctx) - window)
        return with_window(best, ctx.prompt_len, window)

    def _smooth(self, v: torch.Tensor, attention: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S, D) values of the factory form."""
        s = self.settings
        start = math.ceil(s.cam_start_ratio * ctx.prompt_len)
        if start >= ctx.prompt_len - s.window_size:
            return v.repeat_interleave(self.stored_heads // v.shape[1], dim=1)
        draws = self._draw(banded_probabilities(attention, start, s.window_size), ctx)
        if s.cam_exact_loop:
            return merge_loop(v, draws, start, s.span)
        return merge_banded(v, draws, start, s.span, cascade=s.cam_cascade)

    def _draw(self, probabilities: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, n) of 0 and 1, drawn with `probabilities` of that shape.

        Every row draws the same numbers, so that it comes out as it would alone. The generator or the sampler sees
        them step-major, (n, Hs), the order in which a loop over tokens would ask.
        """
        steps = probabilities.transpose(1, 2)
        if ctx.sampler is not None:
            draws = torch.stack([ctx.sampler(row) for row in steps]).to(probabilities)
        else:
            uniform = torch.rand(steps.shape[1:], generator=ctx.generator(self.shape.layer_idx))
            draws = (uniform.to(steps.device) < steps).float()
        return draws.transpose(1, 2)
