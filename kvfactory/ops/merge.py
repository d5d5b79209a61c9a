"""Merging: every dropped token is averaged into the kept token whose key is most similar to its own.

`pivot` is LOOK-M's pivotal merge (arXiv 2406.18139; SUSTechBruce/LOOK-M), `weighted` a similarity-weighted mean; both
as in Zefan-Cai/KVCache-Factory, where `weighted` shares only its idea with KVMerger. Keys are merged after RoPE, so
each average mixes rotations of different positions, and a merged slot still counts once in the softmax.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvfactory.methods.base import Kept, RaggedKept
from kvfactory.ops.select import gather_tokens

_EPS = 1e-6
_CHUNK_BYTES = 256 * 2**20


def merge_dropped(
    k: torch.Tensor, v: torch.Tensor, kept: Kept | RaggedKept, mode: str, target: str = "kv"
) -> Kept | RaggedKept:
    """`kept` with keys and values that have absorbed the dropped tokens.

    Args:
        k, v: (B, Hk, S, D) of the whole prompt, left unchanged.
        mode: "pivot": r' = (r (1 + n/2) + sum d / 2) / (1 + n) over the n tokens d that chose r;
            "weighted": r' = (r + sum w d) / (1 + sum w) with w = (cosine + 1) / 2, at least 1e-6.
        target: "kv" merges keys and values by the keys' assignment, "v" values only.
    """
    B, Hk, S, D = k.shape
    ragged = isinstance(kept, RaggedKept)
    indices, valid = _padded(kept, B) if ragged else (kept.indices, None)
    old_k, old_v = gather_tokens(k, indices), gather_tokens(v, indices)
    base_k = old_k if kept.keys is None else _unflatten(kept.keys, valid, ragged)
    base_v = old_v if kept.values is None else _unflatten(kept.values, valid, ragged)
    keys, values = _absorb(k, v, indices, valid, old_k, base_k, base_v, mode)
    if target == "v":
        keys = base_k
    if ragged:
        keys, values = keys[valid], values[valid]
        return replace(kept, keys=keys, values=values)
    return replace(kept, keys=keys, values=values)


def _padded(kept: RaggedKept, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged positions as (B, Hs, R) indices, R the longest segment, and which of them are real."""
    lengths = kept.lengths.view(B, -1).to(kept.indices.device)
    valid = torch.arange(int(kept.lengths.max()), device=lengths.device) < lengths[..., None]
    indices = torch.zeros(valid.shape, dtype=torch.int64, device=lengths.device)
    indices[valid] = kept.indices[: int(lengths.sum())]
    return indices, valid


def _unflatten(rows: torch.Tensor, valid: torch.Tensor | None, ragged: bool) -> torch.Tensor:
    if not ragged:
        return rows
    padded = rows.new_zeros(*valid.shape, rows.shape[-1])
    padded[valid] = rows
    return padded


def _absorb(
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    valid: torch.Tensor | None,
    anchors: torch.Tensor,
    base_k: torch.Tensor,
    base_v: torch.Tensor,
    mode: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunked exact form: sums over dropped tokens are independent, so chunks of them add up."""
    B, Hk, S, D = k.shape
    Hs, R = indices.shape[1:]
    G = Hs // Hk
    dropped = torch.ones(B, Hs, S, dtype=torch.bool, device=k.device)
    if valid is None:
        dropped.scatter_(2, indices, False)
    else:
        # Padding entries all say position 0: write only the real ones.
        b, h, _ = valid.nonzero(as_tuple=True)
        dropped[b, h, indices[valid]] = False
    unit = torch.nn.functional.normalize(anchors.float(), dim=-1, eps=_EPS)
    folded = unit.view(B, Hk, G * R, D).transpose(2, 3)
    sum_k = torch.zeros(B, Hs, R, D, dtype=torch.float32, device=k.device)
    sum_v = torch.zeros(B, Hs, R, v.shape[-1], dtype=torch.float32, device=k.device)
    mass = torch.zeros(B, Hs, R, dtype=torch.float32, device=k.device)
    chunk = max(1, _CHUNK_BYTES // (4 * B * Hs * R))
    for start in range(0, S, chunk):
        part = slice(start, min(start + chunk, S))
        keys, values = k[:, :, part].float(), v[:, :, part].float()
        C = keys.shape[2]
        similarity = torch.nn.functional.normalize(keys, dim=-1, eps=_EPS) @ folded  # (B, Hk, C, G*R)
        similarity = similarity.view(B, Hk, C, G, R).transpose(2, 3).reshape(B, Hs, C, R)
        if valid is not None:
            similarity = similarity.masked_fill(~valid[:, :, None], -torch.inf)
        best, choice = similarity.max(dim=-1)
        weight = torch.ones_like(best) if mode == "pivot" else ((best + 1) / 2).clamp_min(_EPS)
        weight = weight * dropped[:, :, part]
        mass.scatter_add_(2, choice, weight)
        for total, x in ((sum_k, keys), (sum_v, values)):
            spread = x.repeat_interleave(G, dim=1) * weight[..., None]
            total.scatter_add_(2, choice[..., None].expand_as(spread), spread)
    return tuple(_close(base, total, mass, mode).to(base.dtype) for base, total in ((base_k, sum_k), (base_v, sum_v)))


def _close(base: torch.Tensor, total: torch.Tensor, mass: torch.Tensor, mode: str) -> torch.Tensor:
    """Applies the closed form once; slots that absorbed nothing keep their bits."""
    r, n = base.float(), mass[..., None]
    merged = (r * (1 + n / 2) + total / 2) / (1 + n) if mode == "pivot" else (r + total) / (1 + n)
    return torch.where(n > 0, merged, r)
