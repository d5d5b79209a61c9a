"""The torch definitions of a model's small operations, with the rounding steps of transformers' modules.

In the dtype of a model they give its modules' own bits (transformers, models/llama/modeling_llama.py: LlamaRMSNorm,
LlamaMLP, apply_rotary_pos_emb), so they also tell whether a module computes what a kernel would.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in float32 and rounded to x's dtype, then times `weight`.

    Args:
        x: (..., D); weight: (D,).

    Returns:
        (..., D) in x's dtype. In float64, for the error of others, all of it is float64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate), rounded to the inputs' dtype, times `up`.

    Args:
        gate, up: of one shape and dtype.
        out: where the product goes, `gate` and `up` included; a fresh tensor when not given.
    """
    return torch.mul(functional.silu(gate), up, out=out)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(..., D) -> the second half negated, then the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def rotate_queries_and_keys(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of both; each product and the sum are rounded to the inputs' dtype.

    Args:
        q: (B, Hq, t, D); k: (B, Hk, t, D).
        cos, sin: (B or 1, t, D).

    Returns:
        New tensors of the shapes of q and k.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
