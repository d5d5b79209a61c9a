"""One adapter for FlashAttention 2 (package flash-attn) and 3 (package fa3-fwd).

Both take (B, t, H, D) with native grouping and bottom-right causal masks. Segments of unequal length go through the
varlen call where our decode kernel does not run: the G query heads of a segment are G queries of one sequence, which is
exact for one token. A read under a mask (Oracle's selection, a later turn of several tokens) is something these kernels
do not take and runs on sdpa, as documented in docs/footguns.md.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import torch

from kvfactory.backends import Attend, AttendSegments, AttendWithLse
from kvfactory.backends.log_sum_exp import attend_proven
from kvfactory.backends.sdpa import attend as sdpa_attend

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("fa3_fwd_interface", "fa3-fwd", "pip install fa3-fwd"),
}


def make_backend(name: str) -> tuple[Attend, AttendSegments, AttendWithLse]:
    """The calls of backend `name`.

    Raises:
        ValueError: the package is not installed, or there is no CUDA device.
    """
    module_name, package, install = _PACKAGES[name]
    try:
        module = __import__(module_name)
    except ImportError:
        raise ValueError(
            f"--attn_implementation {name} needs the package {package} ({install}); use sdpa without it"
        ) from None
    if not torch.cuda.is_available():
        raise ValueError(f"--attn_implementation {name} needs a CUDA device and there is none; use sdpa")
    return _dense(name, module), _segments(name, module), _with_lse(name, module.flash_attn_func)


def _check_dtype(name: str, q: torch.Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"--attn_implementation {name} needs float16 or bfloat16, not {q.dtype}; use sdpa or --dtype")


def _output(out: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def _dense(name: str, module: ModuleType) -> Attend:
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
        if mask is not None:
            return sdpa_attend(q, k, v, scale=scale, causal=causal, mask=mask)
        _check_dtype(name, q)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _output(module.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal))

    return attend


@functools.cache  # one kernel per package and process, so that it is proven once
def _with_lse(name: str, function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> AttendWithLse:
    # Early builds of FlashAttention 3 have no such parameter: they always return the log-sum-exp.
    asked = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(function).parameters else {}

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = function(q, k, v, softmax_scale=scale, causal=True, **asked)
        return out, lse

    def attend_with_lse(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `kvfactory.backends.AttendWithLse`."""
        _check_dtype(name, q)
        return attend_proven((kernel,), q, k, v, scale=scale)

    return attend_with_lse


def _segments(name: str, module: ModuleType) -> AttendSegments:
    varlen = module.flash_attn_varlen_func
    takes_used = "seqused_k" in inspect.signature(varlen).parameters

    def segments(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, length: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """See `kvfactory.kernels.reference.segment_decode`."""
        _check_dtype(name, q)
        S, G, D = q.shape
        longest = int(length.max())
        extra = {}
        if takes_used:  # the kernel reads `start` as offsets and stops after `length` slots
            offsets = torch.nn.functional.pad(start, (0, 1), value=k.shape[0])
            extra["seqused_k"] = length.int()
        else:  # sequences have to lie back to back
            offsets = torch.nn.functional.pad(length.cumsum(0), (1, 0))
            first = torch.repeat_interleave(start - offsets[:-1], length)
            slots = first + torch.arange(first.numel(), device=q.device)
            k, v = k[slots], v[slots]
        queries = torch.arange(0, (S + 1) * G, G, device=q.device, dtype=torch.int32)
        out = varlen(
            q.reshape(S * G, 1, D),
            k[:, None],
            v[:, None],
            cu_seqlens_q=queries,
            cu_seqlens_k=offsets.int(),
            max_seqlen_q=G,
            max_seqlen_k=longest,
            softmax_scale=scale,
            causal=False,
            **extra,
        )
        return _output(out).view(S, G, D)

    return segments
