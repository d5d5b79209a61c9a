"""Plain matrix products in the order of operations of transformers' eager attention, so results are bit-equal to it."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kvfactory.backends`."""
    copies = q.shape[1] // k.shape[1]
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    weights = torch.matmul(q, k.transpose(2, 3)) * scale
    if causal:
        t, n = q.shape[2], k.shape[2]
        mask = torch.ones(t, n, dtype=torch.bool, device=q.device).tril(n - t)
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        weights = weights + bias.masked_fill_(~mask, torch.finfo(q.dtype).min)
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()
