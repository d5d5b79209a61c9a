"""One adapter for FlashAttention 2 (package flash-attn) and 3 (package fa3-fwd).

Both take (B, t, H, D) with native grouping and bottom-right causal masks. A step whose heads see different slots needs
a mask, which these kernels do not take: it runs on sdpa, as documented in docs/footguns.md.
"""

from __future__ import annotations

import torch

from kvfactory.backends import Attend
from kvfactory.backends.sdpa import attend as sdpa_attend

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("fa3_fwd_interface", "fa3-fwd", "pip install fa3-fwd"),
}


def make_attend(name: str) -> Attend:
    """The backend for `name`.

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
    kernel = module.flash_attn_func

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        causal: bool,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if mask is not None:
            return sdpa_attend(q, k, v, scale=scale, causal=causal, mask=mask)
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"--attn_implementation {name} needs float16 or bfloat16, not {q.dtype}; use sdpa or --dtype"
            )
        out = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), softmax_scale=scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return attend
