"""How a kernel is judged: its error against float64, beside that of plain torch in the kernel's own dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """One comparison of a kernel with its definition.

    Attributes:
        name: kernel and case, e.g. "decode_attention G=4 D=80".
        dtype: of the kernel's inputs.
        error, allowed: largest absolute error, and what it may be; NaN never passes.
    """

    name: str
    dtype: torch.dtype
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def compare(name: str, got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> Check:
    """flash-attention's rule (its tests/test_flash_attn.py): at most twice the error of plain torch in the same dtype.

    Some float32 roundings of the largest value are allowed on top, since plain torch may be exact by luck: eight, for
    a GPU's approximate exponential and sums in another order (an H200 needed more than four).

    Args:
        got: the kernel's result, any dtype.
        plain: the same formula in plain torch operations in the kernel's dtype.
        exact: the formula in float64 on the same inputs.
    """

    def worst(x: torch.Tensor) -> float:
        return float((x.double() - exact).abs().max())

    rounding = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    return Check(name, got.dtype, worst(got), 2 * worst(plain) + rounding)


def equal(name: str, got: torch.Tensor, want: torch.Tensor) -> Check:
    """A copy or an index has to be the very same: the error counts the elements that differ."""
    return Check(name, got.dtype, float((got != want).sum()), 0.0)
