"""Attention backends with one signature; the group size is read from the shapes, so stored heads may be Hk or Hq.

`backend(q, k, v, *, scale, causal, mask)`: q (B, Hq, t, D), k and v (B, Hs, n, D) -> (B, t, Hq, D), the layout in which
transformers expects attention outputs. `causal` means t == n and position i sees 0..i; `mask` is bool, true where
attended, broadcastable to (B, Hq, t, n), and excludes `causal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Attend(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class AttendSegments(Protocol):
    """Decode attention over segments, as `kvfactory.kernels.reference.segment_decode` defines it."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: torch.Tensor,
        length: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor: ...


class AttendWithLse(Protocol):
    """The attention of a whole prompt, causal and without a mask, and the log-sum-exp of its rows.

    Returns:
        what the plain call returns, and (B, Hq, S) float32, the natural log-sum-exp of every row's scaled logits; None
        where no kernel of the backend is known to give it for these tensors.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None: ...


@dataclass(frozen=True)
class Backend:
    """A named backend; calling it attends.

    Attributes:
        segments_for: queries (S, G, D) -> how it reads segments of unequal length with them; None where masked calls
            over padded copies do.
        attend_with_lse: how it attends and leaves the log-sum-exp too; None where it never does.
    """

    name: str
    attend: Attend
    segments_for: Callable[[torch.Tensor], AttendSegments | None]
    attend_with_lse: AttendWithLse | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.attend(q, k, v, scale=scale, causal=causal, mask=mask)


def get_backend(name: str) -> Backend:
    """The backend of an --attn_implementation.

    Raises:
        ValueError: unknown name, or a package that is not installed.
    """
    if name == "eager":
        from kvfactory.backends.eager import attend
        from kvfactory.kernels.reference import segment_decode

        return Backend(name, attend, lambda q: segment_decode)
    if name == "sdpa":
        from kvfactory.backends.sdpa import attend, attend_with_lse, segments_for

        return Backend(name, attend, segments_for, attend_with_lse)
    if name in ("flash_attention_2", "flash_attention_3"):
        from kvfactory.backends.flash import make_backend
        from kvfactory.backends.sdpa import segments_for

        attend, segments, attend_with_lse = make_backend(name)
        # The varlen call needs the longest length, for which the host waits; at one row, FlashAttention 3's dense call
        # takes three to eight times as long as our kernel (benchmarks/RESULTS.md).
        return Backend(name, attend, lambda q: segments_for(q) or segments, attend_with_lse)
    raise ValueError(f"--attn_implementation {name!r} is not one of eager, sdpa, flash_attention_2, flash_attention_3")
