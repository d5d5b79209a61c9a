"""torch's scaled_dot_product_attention, called through transformers' own wrapper.

The wrapper decides per version and device whether heads are grouped inside the kernel or repeated before it; calling it
keeps FullKV bit-equal to a stock model on every supported version. It reads the group size from a module attribute, so
it gets a stand-in that carries the group size of the stored heads.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfactory.backends.log_sum_exp import attend_proven, obstacle


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
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=causal)
    return sdpa_attention_forward(module, q, k, v, mask, scaling=scale)[0]


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3])  # some versions: (B, Hq, S, 1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p=0.0, is_causal=True, scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.reshape(q.shape[:3])


_KERNELS = {SDPBackend.CUDNN_ATTENTION.value: _cudnn, SDPBackend.FLASH_ATTENTION.value: _flash}


def attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """See `kvfactory.backends.AttendWithLse`.

    The kernel is the one that sdpa itself would choose, with the same arguments (kv heads are not repeated), so that a
    method that asks for the log-sum-exp sees the prompt as FullKV does. Where that kernel's log-sum-exp cannot be used,
    flash attention's is. Both exist on CUDA alone.
    """
    grouped = q.shape[1] > k.shape[1]
    chosen = _KERNELS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped))
    if chosen is None:  # plain matrix products
        return None
    return attend_proven(dict.fromkeys((chosen, _flash)), q, k, v, scale=scale)


def lse_obstacles(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> dict[str, str | None]:
    """By kernel, why its log-sum-exp is not used on a device; None where it is."""
    kernels = {"cudnn": _cudnn, "flash": _flash}
    return {name: obstacle(kernel, device, dtype, head_dim, group) for name, kernel in kernels.items()}
