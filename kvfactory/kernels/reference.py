"""The torch definition of every kernel: what a fused version must compute, and the path where none runs."""

from __future__ import annotations

import torch


def segment_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    *,
    scale: float,
    chunk_bytes: int = 256 * 2**20,
) -> torch.Tensor:
    """Attention of G queries per segment over that segment's slots, without padding.

    Args:
        q: (S, G, D), S segments.
        k, v: (slots, D); segment s owns the slots start[s] .. start[s] + length[s] - 1; segments may share slots.
        start, length: (S,) int64, length >= 1.
        chunk_bytes: bound on the float32 products held at once.

    Returns:
        (S, G, D) in q's dtype; softmax in float32.
    """
    S, G, D = q.shape
    segment = torch.repeat_interleave(torch.arange(S, device=q.device), length)
    first = torch.repeat_interleave(start - (length.cumsum(0) - length), length)
    slot = first + torch.arange(segment.numel(), device=q.device)
    logits = torch.empty(segment.numel(), G, dtype=torch.float32, device=q.device)
    chunk = max(1, chunk_bytes // (8 * G * D))
    for i in range(0, segment.numel(), chunk):
        part = slice(i, i + chunk)
        logits[part] = (q[segment[part]].float() * k[slot[part]].float()[:, None]).sum(-1) * scale
    index = segment[:, None].expand(-1, G)
    top = torch.full((S, G), -torch.inf, device=q.device).scatter_reduce_(0, index, logits, "amax")
    weight = (logits - top[segment]).exp_()
    total = torch.zeros(S, G, device=q.device).index_add_(0, segment, weight)
    out = torch.zeros(S, G, D, device=q.device)
    for i in range(0, segment.numel(), chunk):
        part = slice(i, i + chunk)
        out.index_add_(0, segment[part], weight[part, :, None] * v[slot[part]].float()[:, None])
    return (out / total[..., None]).to(q.dtype)
