"""The log-sum-exp that a library's causal attention leaves behind, used only where a small prompt has proven it.

A kernel is `kernel(q, k, v, *, scale)`: q (B, Hq, S, D), k and v (B, Hk, S, D) -> the attention (B, S, Hq, D) and the
natural log-sum-exp of every row's scaled causal logits, (B, Hq, S) float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch


class LseKernel(Protocol):
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@functools.cache
def obstacle(kernel: LseKernel, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> str | None:
    """Why a kernel's log-sum-exp is not used for such inputs; None where it is right. Tried once per process.

    What the libraries return beside the output is no part of their documented interface: versions differ in shape,
    base and scaling, and in what they refuse. The prompt of the trial is longer than a tile of any kernel and no
    multiple of one, its scale is not the default, and it lies in memory as a model's does.
    """
    S, scale = 150, 0.7 * head_dim**-0.5
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, S, heads, head_dim, generator=random).to(device, dtype).transpose(1, 2)
        for heads in (2 * group, 2, 2)
    )
    try:
        with torch.no_grad():
            out, lse = kernel(q, k, v, scale=scale)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except RuntimeError as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = q.double() @ keys.transpose(2, 3) * scale
    logits.masked_fill_(torch.ones(S, S, dtype=torch.bool, device=device).triu(1), -torch.inf)
    want = (logits.softmax(-1) @ values).transpose(1, 2)
    if out.shape != want.shape or lse.shape != q.shape[:3] or lse.dtype != torch.float32:
        return f"it returns {tuple(out.shape)} and a log-sum-exp of {tuple(lse.shape)}, {lse.dtype}"
    off = float((lse - logits.logsumexp(-1)).abs().max())
    if not off <= 1e-4:  # logits are sums of exact products, so some float32 roundings of about 6
        return f"its log-sum-exp is off by {off:.2g}"
    off = float((out - want).abs().max())
    if not off <= 4 * torch.finfo(dtype).eps * float(want.abs().max()):
        return f"its output is off by {off:.2g}"
    return None


def attend_proven(
    kernels: Iterable[LseKernel], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The attention and log-sum-exp of the first kernel without an obstacle; None when all have one."""
    for kernel in kernels:
        if obstacle(kernel, q.device, q.dtype, q.shape[-1], q.shape[1] // k.shape[1]) is None:
            return kernel(q, k, v, scale=scale)
    return None
