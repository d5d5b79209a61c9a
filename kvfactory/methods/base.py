"""The hooks of a method: one KVCluster object per attention layer, one subclass per method.

A method is one file in this folder: a subclass of `KVCluster` (or `TokenSelector`, when it ranks prompt tokens and
keeps the best) with `Settings`, `capability` and a docstring. Methods see tensors only: never a module, a config or
transformers.

Shapes: q (B, Hq, S, D), k and v (B, Hk, S, D), post-RoPE and unrepeated; G = Hq / Hk; Hs stored heads, Hk or Hq.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from kvfactory.capability import Capability
from kvfactory.ops.scores import reduce_groups
from kvfactory.ops.select import top_positions, with_window
from kvfactory.settings import MethodSettings

if TYPE_CHECKING:
    from kvfactory.cache.store import DenseStore, Store


@dataclass(frozen=True)
class LayerShape:
    """Where a cluster sits. `layer_idx` and `num_layers` count the compressible (full-attention) layers only."""

    layer_idx: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class PromptContext:
    """Facts of one example that every layer of one cache shares.

    Attributes:
        prompt_len: S, in tokens.
        budget: tokens per stored head, resolved for this prompt.
        seed, example_id: what the generator of a randomised method is made of, together with the layer.
        sampler: replaces the random draw of a randomised method: a function of the probabilities.
        template_tail: tokens of chat template at the end, which an observation window is to lie in front of; 0 puts it
            at the very end.
        lse: no fact of the example but of one layer, and only in the context that `compress` gets: (B, Hq, S) float32
            log-sum-exp of every row's scaled causal logits, where a cluster wanted it and the attention has left it.
    """

    prompt_len: int
    budget: int
    seed: int = 42
    example_id: str = ""
    sampler: Callable[[torch.Tensor], torch.Tensor] | None = None
    template_tail: int = 0
    lse: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def generator(self, layer_idx: int, step: int | None = None) -> torch.Generator:
        """A CPU generator made of (seed, example, layer[, step]) alone: order, shards and resumes do not matter."""
        key = zlib.crc32(f"{self.seed}|{self.example_id}|{layer_idx}|{'' if step is None else step}".encode())
        return torch.Generator().manual_seed((self.seed << 32) ^ key)


@dataclass
class Kept:
    """What a layer keeps of the prompt.

    Attributes:
        indices: (B, Hs, n) int64 kept positions, ascending.
        keys, values: (B, Hs, n, D) replacements for the gathered rows, where a method changes them.
        columns: (B, Hs, n) numbers that the slots carry into decoding, for methods that evict there.
        history: other tensors that decoding needs, counted as auxiliary bytes.
    """

    indices: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    history: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class RaggedKept:
    """What a layer keeps when its heads keep different numbers of tokens.

    Segments lie back to back, one per (row, stored head), row-major.

    Attributes:
        indices: (N,) int64 kept positions, ascending inside a segment; behind the last segment any positions.
        lengths: (B * Hs,) int64 tokens per segment, on the host or the device, wherever the method knows them.
        keys, values: (N, D) replacements for the gathered rows, where a method changes them.
    """

    indices: torch.Tensor
    lengths: torch.Tensor
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class KVCluster:
    """One method at one layer. The default hooks keep everything and see everything (FullKV)."""

    name: ClassVar[str]
    capability: ClassVar[Capability]
    heads_declared: ClassVar[bool] = True
    """Whether `declared` holds per head; False where only the layer's total is known before the prompt runs."""
    Settings: ClassVar[type[MethodSettings]] = MethodSettings

    def __init__(
        self, settings: MethodSettings, shape: LayerShape, granularity: str = "query_head", gqa_score_agg: str = "mean"
    ):
        self.settings = settings
        self.shape = shape
        self.granularity = granularity
        self.gqa_score_agg = gqa_score_agg
        # attach() puts the model's own scaling and rotary frequencies (rotated dims / 2,) here.
        self.scale = shape.head_dim**-0.5
        self.inv_freq: torch.Tensor | None = None

    @classmethod
    def check_model(cls, settings: MethodSettings, shape: LayerShape, model: str | None) -> None:
        """Refuses, with ValueError, settings that do not belong to a model of this shape or name (None: not known)."""

    @property
    def stored_heads(self) -> int:
        """Hs of a compressed layer: kv heads wherever the content is the same for all query heads of a group."""
        if self.granularity == "kv_head" or self.capability.same_for_all_heads:
            return self.shape.num_kv_heads
        return self.shape.num_heads

    def declared(self, ctx: PromptContext) -> list[int]:
        """Kept prompt tokens per stored head of this layer, known before the prompt runs."""
        return [ctx.prompt_len] * self.shape.num_kv_heads

    def declared_bounds(self, ctx: PromptContext) -> tuple[int, int]:
        """Least and most kept tokens of this layer's stored heads together."""
        total = sum(self.declared(ctx))
        return total, total

    def mismatch(self, stored: list[int], ctx: PromptContext) -> str | None:
        """The proof of compression: what is wrong with `stored` slots per head, or None when they are as declared."""
        least, most = self.declared_bounds(ctx)
        if not least <= sum(stored) <= most:
            return f"{sum(stored)} slots are stored and {least} to {most} declared"
        if self.heads_declared and stored != self.declared(ctx):
            return f"heads store {stored} slots and {self.declared(ctx)} are declared"
        return None

    @property
    def changes_prompt(self) -> bool:
        """Whether the prompt pass itself depends on the method, so that it cannot be shared with others."""
        return type(self).before_attend is not KVCluster.before_attend

    def before_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the prompt's attention and `compress` see instead; only CAM's leak changes them."""
        return k, v

    def wants_lse(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether `compress` is quicker with `ctx.lse`, for such queries and keys; it has to do without as well."""
        return False

    def compress(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext
    ) -> Kept | RaggedKept | None:
        """Called once, after the prompt's attention, with the layer's full tensors, which it must not change.

        Returns:
            What to keep, or None for everything (then stored at kv heads).
        """
        return None

    @property
    def evicts(self) -> bool:
        """Whether `evict` is called after every decode step."""
        return False

    def evict(self, q: torch.Tensor, store: DenseStore, position: int, ctx: PromptContext) -> None:
        """Called after the attention of one new token at `position`, whose keys are the store's last slot."""

    def select(self, q: torch.Tensor, store: Store, ctx: PromptContext) -> torch.Tensor | None:
        """Called before each decode read with q (B, Hq, 1, D).

        Returns:
            (B, Hq, 1, N) bool, true where a stored slot is attended; None for all.
        """
        return None


class TokenSelector(KVCluster):
    """Keeps `kept(ctx)` prompt tokens per stored head: the best by `scores`, or whatever `positions` returns.

    A subclass defines `kept` when it is not the budget itself, and `scores` (window excluded) or `positions`.
    """

    def kept(self, ctx: PromptContext) -> int:
        """Kept tokens per stored head of this layer."""
        return min(ctx.budget, ctx.prompt_len)

    def declared(self, ctx: PromptContext) -> list[int]:
        kept = self.kept(ctx)
        heads = self.shape.num_kv_heads if kept >= ctx.prompt_len else self.stored_heads
        return [kept] * heads

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> Kept | None:
        if self.kept(ctx) >= ctx.prompt_len:
            return None
        return Kept(self.positions(q, k, v, ctx))

    def window(self, ctx: PromptContext) -> int:
        """How many of the last prompt tokens are always kept, inside the budget."""
        return self.settings.window_size

    def positions(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, kept) ascending positions: the best-scored tokens, then the window."""
        window = self.window(ctx)
        best = top_positions(self.scores(q, k, v, ctx), self.kept(ctx) - window)
        return with_window(best, ctx.prompt_len, window)

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        """(B, Hs, S - window): higher is kept."""
        raise NotImplementedError(f"{self.name} must define scores() or positions()")

    def per_stored_head(self, scores: torch.Tensor) -> torch.Tensor:
        """(B, Hq, P) -> (B, Hs, P): aggregated over each group at kv_head granularity, before any pooling."""
        if self.stored_heads == self.shape.num_heads:
            return scores
        return reduce_groups(scores, self.shape.num_kv_heads, self.gqa_score_agg)
