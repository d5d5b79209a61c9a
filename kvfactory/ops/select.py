"""Top-k with a fixed rule for ties, and gathering of kept tokens without repeating keys or values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvfactory.methods.base import Kept


def rank_keys(scores: torch.Tensor) -> torch.Tensor:
    """Unique int64 keys that order `scores` (any float dtype, last dim = position) with ties to the lower position.

    Max-pooled scores tie as a rule, and a plain top-k breaks ties differently on every device; with unique keys every
    selection algorithm gives the same set. The upper 32 bits are the float32 bits mapped to an order-preserving
    integer, the lower 32 bits count down with the position.
    """
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0: equal floats, equal bits
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    position = torch.arange(scores.shape[-1], device=scores.device, dtype=torch.int64)
    return ordered * (1 << 32) + (0xFFFFFFFF - position)


def top_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the `count` largest scores along the last dim, ascending; ties go to the lower position.

    Args:
        scores: (..., P) floating point, no NaN.
        count: how many to keep, 0 <= count <= P.

    Returns:
        (..., count) int64.
    """
    chosen = rank_keys(scores).topk(count, dim=-1, sorted=False).indices
    return chosen.sort(dim=-1).values


def with_window(selected: torch.Tensor, prompt_len: int, window: int) -> torch.Tensor:
    """Appends the last `window` prompt positions to ascending `selected` (B, H, n), all below prompt_len - window."""
    tail = torch.arange(prompt_len - window, prompt_len, device=selected.device)
    return torch.cat([selected, tail.expand(*selected.shape[:-1], window)], dim=-1)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on `device`; from the host it is copied in the stream's order, without waiting for the device."""
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def gather_tokens(x: torch.Tensor, kept: Kept | torch.Tensor) -> torch.Tensor:
    """Rows of `x` (B, Hk, S, D) at indices (B, Hs, n) -> contiguous (B, Hs, n, D).

    Hs is Hk, or Hq with query head h reading kv head h // (Hq / Hk); keys and values are never repeated first.
    """
    indices = kept if isinstance(kept, torch.Tensor) else kept.indices
    B, Hk, _, D = x.shape
    _, Hs, n = indices.shape
    grouped = indices.reshape(B, Hk, (Hs // Hk) * n, 1).expand(-1, -1, -1, D)
    return x.gather(2, grouped).view(B, Hs, n, D)
