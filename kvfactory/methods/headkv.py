from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvfactory.capability import Capability
from kvfactory.methods import register
from kvfactory.methods.base import LayerShape, PromptContext, RaggedKept
from kvfactory.methods.snapkv import WindowSelector, WindowSettings
from kvfactory.ops.adaptive import ragged_positions, rank_tokens, window_means
from kvfactory.ops.budget import head_demand, per_kv_head, water_fill
from kvfactory.ops.head_scores import UNIFORM, HeadScores, check_scores_fit, load_head_scores, uniform_scores
from kvfactory.ops.scores import pool_scores
from kvfactory.ops.select import to_device
from kvfactory.settings import Cell, MethodSettings, setting

Table = tuple[tuple[int, ...], ...]


def capacity_table(value: Any) -> Table:
    """A layers x query heads table of past tokens, from nested sequences, an array or a tensor.

    Raises:
        ValueError: not a matrix, or an entry that is negative or no whole number.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        table = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("head_capacity is not a layers x query heads table of numbers") from None
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"head_capacity has shape {table.shape}: need a table of layers x query heads")
    if not np.isfinite(table).all() or (table < 0).any() or (table != np.rint(table)).any():
        raise ValueError("head_capacity counts tokens: every entry must be a whole number, 0 or more")
    return tuple(tuple(int(n) for n in row) for row in table)


@register("HeadKV")
class HeadKV(WindowSelector):
    """SnapKV's selection with a fixed budget per head: heads that retrieved in a probe get more.

    Paper: Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    arXiv 2410.19258. Code: FYYFU/HeadKV, headkv/snapkv_utils.py; Zefan-Cai/KVCache-Factory, run_longbench.py and
    pyramidkv/pyramidkv_utils.py (HeadKVCluster). Settings: `head_beta` 1.01 in the factory and 1.5 in the paper preset;
    `headkv_accounting` puts the window on top of the budget (factory) or inside it (original). Departures: scores are
    read by index and never for another model; a prompt within the budget is kept whole; what a head asks for beyond
    the prompt is lost as in both codes, unless `headkv_overflow` redistributes it.
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
        head_path: str | None = setting(
            None, f"head score file of this very model (python -m kvfactory.probe_heads makes one), or {UNIFORM}"
        )
        head_path_force: bool = setting(False, "accept a head score file that was probed on another model")
        head_beta: float = setting(
            1.01,
            "1/beta of the budget is shared out by head score, the rest is every head's minimum",
            paper=1.5,
            paper_mark="read",
            authors=Cell(1.5, "read"),
        )
        headkv_accounting: str = setting(
            "factory",
            "factory: the window comes on top of the budget; original: it is inside",
            paper="original",
            paper_mark="read",
            choices=("factory", "original"),
            authors=Cell("original", "read"),
        )
        headkv_overflow: str = setting(
            "clip",
            "what a head asks for beyond the prompt is lost (clip) or goes to other heads (redistribute)",
            choices=("clip", "redistribute"),
            authors=Cell("clip", "read"),
        )
        head_capacity: Table | None = dataclasses.field(
            default=None,
            metadata={
                "help": "Python only: past tokens per layer and query head, instead of scores; the window comes on top",
                "choices": None,
                "factory": Cell(None, "read"),
                "paper": Cell(None, "read"),
                "authors": None,
                "cli": False,
                "convert": capacity_table,
            },
        )

        @property
        def window_inside(self) -> bool:
            """Whether the window (and a template tail behind it) counts against the budget."""
            return self.headkv_accounting == "original" and self.head_capacity is None

        def own_budget(self) -> int | None:
            """With a ready table: its mean, on top of which the window comes."""
            return None if self.head_capacity is None else max(1, int(np.mean(self.head_capacity)))

        def validate(self, budget: int | None) -> None:
            super().validate(budget if self.window_inside else None)
            if not (math.isfinite(self.head_beta) and self.head_beta >= 1):
                raise ValueError(f"--head_beta {self.head_beta} must be at least 1: 1/beta is the share of the pool")
            if self.head_capacity is not None:
                if self.head_path is not None:
                    raise ValueError(f"--head_path {self.head_path} and head_capacity both set the budgets: give one")
                return
            if self.head_path is None:
                raise ValueError(
                    "HeadKV needs head scores of the model: give --head_path FILE (python -m kvfactory.probe_heads "
                    f"makes one) or --head_path {UNIFORM}"
                )
            if self.head_path != UNIFORM:
                load_head_scores(self.head_path)

    capability = Capability(
        stage="prompt-evict",
        budget_means="mean over heads",
        reference="arXiv 2410.19258; FYYFU/HeadKV, headkv/snapkv_utils.py",
    )

    def __init__(self, settings: MethodSettings, shape: LayerShape, *args: Any, **kwargs: Any):
        super().__init__(settings, shape, *args, **kwargs)
        self.check_model(settings, shape)
        if settings.head_capacity is None:
            self._scores: HeadScores | None = _head_scores(settings, shape)
            self._table = None
        else:
            self._scores = None
            self._table = capacity_table(settings.head_capacity)

    @classmethod
    def check_model(cls, settings: MethodSettings, shape: LayerShape, model: str | None = None) -> None:
        """Refuses head scores or a table that do not belong to a model of this shape and, where known, this name."""
        if settings.head_capacity is None:
            scores = _head_scores(settings, shape)
            check_scores_fit(scores, shape.num_layers, shape.num_heads, model, settings.head_path_force)
            return
        got = np.shape(settings.head_capacity)
        if got != (shape.num_layers, shape.num_heads):
            raise ValueError(
                f"head_capacity has shape {got}, the model has {shape.num_layers} layers x {shape.num_heads} query "
                "heads: need one entry for each"
            )

    def past_counts(self, ctx: PromptContext) -> np.ndarray:
        """(Hs,) past tokens of this layer's stored heads; known from lengths alone."""
        s, past = self.settings, ctx.prompt_len - self.window(ctx)
        if self._table is not None:
            table = _from_table(self._table, self.stored_heads, past, s.headkv_overflow)
        else:
            capacity = ctx.budget - (self.window(ctx) if s.window_inside else 0)
            table = _from_scores(self._scores, capacity, s.head_beta, self.stored_heads, past, s.headkv_overflow)
        return table[self.shape.layer_idx]

    def check_room(self, ctx: PromptContext) -> None:
        if self.settings.window_inside:
            super().check_room(ctx)

    def keeps_all(self, ctx: PromptContext) -> bool:
        """Whether this layer keeps the whole prompt."""
        past = ctx.prompt_len - self.window(ctx)
        return ctx.prompt_len <= ctx.budget or past <= 0 or bool((self.past_counts(ctx) == past).all())

    def declared(self, ctx: PromptContext) -> list[int]:
        if self.keeps_all(ctx):
            return [ctx.prompt_len] * self.shape.num_kv_heads
        return (self.past_counts(ctx) + self.window(ctx)).tolist()

    def compress(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> RaggedKept | None:
        self.check_room(ctx)
        if self.keeps_all(ctx):
            return None
        order = rank_tokens(self.scores(q, k, v, ctx)).order
        counts = torch.from_numpy(self.past_counts(ctx)).repeat(k.shape[0], 1)
        lengths = counts.flatten() + self.window(ctx)
        on_device = to_device(counts, order.device)
        indices, _ = ragged_positions(order, on_device, self.window(ctx), size=int(lengths.sum()))
        return RaggedKept(indices, lengths)

    def scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: PromptContext) -> torch.Tensor:
        s = self.settings
        q, k = self.observed(q, ctx), self.observed(k, ctx)
        raw = window_means(q, k, s.window_size, scale=self.scale, score_dtype=s.score_dtype)
        return pool_scores(self.per_stored_head(raw), s.kernel_size, s.pooling)


def _head_scores(settings: MethodSettings, shape: LayerShape) -> HeadScores:
    if settings.head_path == UNIFORM:
        return uniform_scores(shape.num_layers, shape.num_heads)
    return load_head_scores(settings.head_path)


@functools.lru_cache(maxsize=256)
def _from_scores(
    scores: HeadScores, capacity: int, beta: float, stored_heads: int, past: int, overflow: str
) -> np.ndarray:
    """(L, Hs) int64 past tokens of every head; one computation serves all layers of an example."""
    if overflow == "redistribute":
        group = scores.values.shape[1] // stored_heads
        shares = per_kv_head(scores.values, stored_heads) * group
        demand = head_demand(shares, capacity, beta)
        return water_fill(demand, shares, past, demand.size * capacity)
    table = np.rint(head_demand(scores.values, capacity, beta))
    return np.minimum(np.rint(per_kv_head(table, stored_heads)), past).astype(np.int64)


@functools.lru_cache(maxsize=256)
def _from_table(table: Table, stored_heads: int, past: int, overflow: str) -> np.ndarray:
    """(L, Hs) int64 past tokens of every head from a ready layers x query heads table."""
    demand = per_kv_head(np.array(table, dtype=np.float64), stored_heads)
    if overflow == "redistribute":
        return water_fill(demand, demand, past, round(demand.sum()))
    return np.minimum(np.rint(demand), past).astype(np.int64)
