"""Attention-derived token scores. No function here ever holds an S x S matrix.

Query head h reads kv head h // G, with G = Hq / Hk. Keys are never repeated: the G query heads of a group are folded
into the row dimension of one matrix product. Scores are float32; `score_dtype="model"` reproduces the rounding of the
original (logits and probabilities in the model's dtype, softmax in float32). Float32 scores come from fused kernels
where `kvfactory.kernels.dispatch` has them run.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from kvfactory.kernels.dispatch import use_triton

SCORE_BLOCK_BYTES = 256 * 2**20


def fused_scores(q: torch.Tensor, k: torch.Tensor) -> ModuleType | None:
    """`kvfactory.kernels.attention_scores` where its kernels take these tensors on their device, else None."""
    if not use_triton(q.device):
        return None
    from kvfactory.kernels import attention_scores

    return attention_scores if attention_scores.supports(q, k) else None


def _fold(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(B, Hq, R, D) -> (B, Hk, G*R, D)."""
    B, Hq, R, D = q.shape
    return q.reshape(B, num_kv_heads, (Hq // num_kv_heads) * R, D)


def attention_rows(
    q: torch.Tensor, k: torch.Tensor, start: int, stop: int, *, scale: float, score_dtype: str = "float32"
) -> torch.Tensor:
    """Causal attention probabilities of the query rows [start, stop) over the keys [0, stop).

    Args:
        q: (B, Hq, S, D) post-RoPE queries of the whole prompt.
        k: (B, Hk, S, D) post-RoPE keys.
        score_dtype: "float32", or "model" for the original's rounding.

    Returns:
        (B, Hq, stop - start, stop), float32 or q's dtype. Row r sees the keys 0 .. start + r.
    """
    B, Hq, _, _ = q.shape
    Hk, rows = k.shape[1], stop - start
    queries, keys = q[:, :, start:stop], k[:, :, :stop]
    if score_dtype == "float32":
        queries, keys = queries.float(), keys.float()
    logits = (_fold(queries, Hk) @ keys.transpose(2, 3)).view(B, Hq, rows, stop) * scale
    # Only the last `rows` columns of a block can lie in a row's future.
    future = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    logits[..., start:].masked_fill_(future, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, dim=-1, dtype=torch.float32).to(logits.dtype)


def window_scores(
    q: torch.Tensor, k: torch.Tensor, window: int, *, scale: float, score_dtype: str = "float32"
) -> torch.Tensor:
    """Attention that the last `window` queries give to each earlier token, summed over the window.

    Returns:
        (B, Hq, S - window), float32 or q's dtype.
    """
    S = q.shape[2]
    if score_dtype == "float32" and (fused := fused_scores(q, k)):
        return fused.window_scores(q, k, window, scale=scale)
    rows = attention_rows(q, k, S - window, S, scale=scale, score_dtype=score_dtype)
    return rows[..., : S - window].sum(dim=2)


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float,
    first_row: int = 0,
    score_dtype: str = "float32",
    block_bytes: int = SCORE_BLOCK_BYTES,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that every token receives from the query rows [first_row, S), computed in row blocks.

    All keys a row may see are present in its block, so the softmax of each block is exact.

    Args:
        block_bytes: bound on one block's probabilities in bytes; fused kernels hold none.
        lse: (B, Hq, S) natural log-sum-exp of every row's scaled causal logits, where the attention has left it: saves
            fused kernels one of two passes.

    Returns:
        (B, Hq, S) float32; with score_dtype "model" each probability is rounded first and the total once at the end.
    """
    B, Hq, S, _ = q.shape
    if score_dtype == "float32":
        if fused := fused_scores(q, k):
            return fused.column_sums(q, k, scale=scale, first_row=first_row, lse=lse)
        k = k.float()
    total = torch.zeros(B, Hq, S, dtype=torch.float32, device=q.device)
    block = max(1, block_bytes // (4 * B * Hq * S))
    for start in range(first_row, S, block):
        stop = min(start + block, S)
        rows = attention_rows(q, k, start, stop, scale=scale, score_dtype=score_dtype)
        total[..., :stop] += rows.sum(dim=2, dtype=torch.float32)
    return total if score_dtype == "float32" else total.to(q.dtype)


def reduce_groups(scores: torch.Tensor, num_kv_heads: int, how: str) -> torch.Tensor:
    """(B, Hq, P) -> (B, Hk, P): mean, max or sum over the query heads of each kv head."""
    B, Hq, P = scores.shape
    grouped = scores.view(B, num_kv_heads, Hq // num_kv_heads, P)
    if how == "mean":
        return grouped.mean(dim=2)
    if how == "max":
        return grouped.amax(dim=2)
    if how == "sum":
        return grouped.sum(dim=2)
    raise ValueError(f"gqa_score_agg={how!r} is not one of mean, max, sum")


def pool_scores(scores: torch.Tensor, kernel_size: int, pooling: str) -> torch.Tensor:
    """1-D pooling along the last dim of (B, H, P), stride 1, same length; kernel_size is odd.

    "maxpool" ignores what lies beyond the edges, "avgpool" counts it as zeros (both as in SnapKV's code).
    """
    if pooling == "maxpool":
        return F.max_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
    if pooling == "avgpool":
        return F.avg_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
    raise ValueError(f"pooling={pooling!r} is not one of maxpool, avgpool")
