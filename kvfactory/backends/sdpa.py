"""torch's scaled_dot_product_attention, called through transformers' own wrapper.

The wrapper decides per version and device whether heads are grouped inside the kernel or repeated before it; calling it
keeps FullKV bit-equal to a stock model on every supported version. It reads the group size from a module attribute, so
it gets a stand-in that carries the group size of the stored heads.

On Hopper sdpa chooses cuDNN, which plans every shape that it has not met in the process: 37 to 65 ms on an H200, each
time a prompt of another length comes or a cache has grown by a token (benchmarks/RESULTS.md). So it is given prompts of
few lengths, and no single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfactory.backends import AttendSegments
from kvfactory.backends.log_sum_exp import attend_proven, obstacle
from kvfactory.kernels.dispatch import use_triton
from kvfactory.kernels.segments import DTYPES, MAX_GROUP, MAX_HEAD_DIM

PLANNED_LENGTHS = 256
"""Prompts that cuDNN attends to are padded to multiples of this many tokens."""


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
    S = q.shape[2]
    if S == 1:
        with _without_cudnn():
            return _attend(q, k, v, scale, causal, mask)
    if causal and _chosen(q, k, v, scale) == SDPBackend.CUDNN_ATTENTION.value:
        return _attend(*_padded(q, k, v), scale, causal, mask)[:, :S]
    return _attend(q, k, v, scale, causal, mask)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=causal)
    return sdpa_attention_forward(module, q, k, v, mask, scaling=scale)[0]


@contextmanager
def _without_cudnn() -> Iterator[None]:
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def _chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> int | None:
    """What sdpa would choose for a prompt on CUDA, a value of `SDPBackend`; None elsewhere."""
    if not q.is_cuda:
        return None
    grouped = q.shape[1] > k.shape[1]
    return torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=scale, enable_gqa=grouped)


def _padded(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(B, H, S, D) each, with zeros behind the prompt, where no query of the prompt looks: its rows do not change.

    They lie in memory as models leave them, (B, S, H, D).
    """
    more = -tensors[0].shape[2] % PLANNED_LENGTHS
    if not more:
        return list(tensors)
    return [torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, 0, 0, more)).transpose(1, 2) for x in tensors]


def segments_for(q: torch.Tensor) -> AttendSegments | None:
    """The decode kernel where it runs: one launch for a layer's segments, whatever their lengths."""
    _, G, D = q.shape
    if G > MAX_GROUP or D > MAX_HEAD_DIM or q.dtype not in DTYPES or not use_triton(q.device):
        return None
    from kvfactory.kernels.decode_attention import decode_attention

    return decode_attention


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    S = q.shape[2]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_padded(q, k, v), None, compute_log_sumexp=True, dropout_p=0.0, is_causal=True, scale=scale
    )
    lse = lse.reshape(*q.shape[:2], -1)[..., :S].contiguous()  # some versions: (B, Hq, S, 1)
    return out.transpose(1, 2).contiguous()[:, :S], lse


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
    chosen = _KERNELS.get(_chosen(q, k, v, scale))
    if chosen is None:  # plain matrix products
        return None
    return attend_proven(dict.fromkeys((chosen, _flash)), q, k, v, scale=scale)


def lse_obstacles(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> dict[str, str | None]:
    """By kernel, why its log-sum-exp is not used on a device; None where it is."""
    kernels = {"cudnn": _cudnn, "flash": _flash}
    return {name: obstacle(kernel, device, dtype, head_dim, group) for name, kernel in kernels.items()}
