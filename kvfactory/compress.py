"""`compress_prompt`: a method's selection on plain tensors, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvfactory.budget import Budget
from kvfactory.cache.ragged import RaggedStore
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import Kept, LayerShape, PromptContext, RaggedKept
from kvfactory.ops.merge import merge_dropped
from kvfactory.plan import make_plan


@dataclass
class KeptLists:
    """What a method keeps, as nested lists: per batch row, per head of the granularity asked for.

    Attributes:
        indices: ascending int64 positions.
        keys, values: (n, D) rows, merged or thinned where the method does that.
        channels: ascending kept channel ids (ThinK), else None.
    """

    indices: list[list[torch.Tensor]]
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]
    channels: list[list[torch.Tensor]] | None = None


def compress_prompt(
    method: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layer_idx: int = 0,
    num_layers: int = 1,
    example_id: str = "",
    sampler: Any = None,
    template_tail: int = 0,
    **options: Any,
) -> KeptLists:
    """Runs the prompt-time step of one layer.

    Args:
        q: (B, Hq, S, D) post-RoPE; k, v: (B, Hk, S, D) post-RoPE, unrepeated. Left unchanged.
        template_tail: tokens of chat template at the end, in front of which the observation window lies.
        options: as in `kvfactory.attach`.

    Raises:
        ValueError: bad options or shapes, a method that keeps all tokens at prompt time and acts later, or a template
            tail that leaves no room in the budget or is given to a method without an observation window.
    """
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    if not fits or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: need (B, Hq, S, D) and twice (B, Hk, S, D) "
            "with Hq a multiple of Hk"
        )
    plan = make_plan(method, **options)
    if plan.cluster.capability.stage not in ("none", "prompt-evict", "channel"):
        raise ValueError(f"{plan.method} keeps every prompt token: there is nothing to compress at prompt time")
    B, Hq, S, D = q.shape
    Hk = k.shape[1]
    plan.check_template_tail(template_tail, S)
    cluster = plan.build(LayerShape(layer_idx, num_layers, Hq, Hk, D))
    budget: Budget = plan.budget
    if budget.bytes_percent is not None:
        raise ValueError("budget_bytes needs a model: give max_capacity_prompt or max_capacity_prompt_ratio")
    if plan.uses_budget:
        budget.check_resolved(budget.resolve(S), S, plan.settings.validate)
    tokens = budget.resolve(S) if plan.uses_budget else S
    ctx = PromptContext(S, tokens, plan.seed, example_id, sampler, template_tail)
    k, v = cluster.before_attend(q, k, v, ctx)
    kept = cluster.compress(q, k, v, ctx)
    if kept is not None and plan.merge is not None:
        kept = merge_dropped(k, v, kept, plan.merge, plan.merge_target)
    if kept is None:
        kept = Kept(torch.arange(S, device=k.device).expand(B, Hk, S))
    if isinstance(kept, RaggedKept):
        segments = kept.lengths.tolist()
        rows = (kept.indices, *RaggedStore.build(k, v, kept, slack=0).buffers)
        indices, keys, values = ([list(part) for part in _batched(x[: sum(segments)].split(segments), B)] for x in rows)
        return KeptLists(indices, keys, values)
    heads = Hq if plan.granularity == "query_head" else Hk
    rows = (kept.indices, *DenseStore(k, v, slack=0, kept=kept).view())
    # One list per head of the granularity asked for, also where the store shares one copy among a group.
    indices, keys, values = ([list(row) for row in x.repeat_interleave(heads // x.shape[1], dim=1)] for x in rows)
    return KeptLists(indices, keys, values)


def _batched(parts: tuple[torch.Tensor, ...], rows: int) -> list[tuple[torch.Tensor, ...]]:
    per_row = len(parts) // rows
    return [parts[i * per_row : (i + 1) * per_row] for i in range(rows)]
