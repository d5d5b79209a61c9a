"""Moving keys that carry a rotary embedding to other positions: rotations add up, R(p + d) = R(d) R(p)."""

from __future__ import annotations

import torch


def rotate(k: torch.Tensor, delta: int, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keys (..., D) as if they stood `delta` positions later; angles and arithmetic in float32.

    Halves are paired as in Llama (dimension i with i + r/2 of the r rotated ones); further dimensions stay. A scaling
    of the embedding's length is inside `k` already and is not applied again.

    Args:
        inv_freq: (r / 2,) rotary frequencies in radians per position.
    """
    half = inv_freq.numel()
    angle = delta * inv_freq.to(k.device, torch.float32)
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = k.float().split([half, half, k.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return turned.to(k.dtype)
