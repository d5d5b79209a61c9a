"""Small operations of a model in one pass over memory each: RMSNorm, SwiGLU, rotary embedding.

Definitions, with the same rounding steps: `kvfactory.kernels.model_reference`. Nothing here waits for the host or
keeps state, so a captured graph replays it. No kernel has a backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfactory.kernels import model_reference
from kvfactory.kernels.checks import Check, compare
from kvfactory.kernels.segments import DTYPES

MAX_NORM_SIZE = 16384
"""Channels of an RMSNorm: one program holds a row in registers."""

_NORM_TILE = 1024  # short rows, such as heads, share a program
_SWIGLU_TILE = 1024
_HEADS = 8  # per program of the rotation


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(x, weight, out, rows, eps, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (row tiles,). x, out: (rows, D)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_D)
    inside = (row < rows)[:, None] & (channel < D)[None, :]
    at = row[:, None] * D + channel[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / D + eps)
    normed = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + channel, mask=channel < D, other=0.0).to(tl.float32)
    tl.store(out + at, (normed * weights[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(gate, up, out, gate_row, up_row, out_row, D: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows * blocks of channels,), the blocks of a row side by side. An element is read before it is written."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    gates = tl.load(gate + row * gate_row + channel, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + channel, mask=inside, other=0.0).to(tl.float32)
    silu = (gates / (1.0 + tl.exp(-gates))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_row + channel, (silu * ups).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_heads(
    x,
    out,
    x_head,
    out_head,
    first,
    heads,
    cos,
    sin,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads `first` .. of one token. x, out: its (heads, 2 * HALF); cos, sin: its (2 * HALF,)."""
    head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    in_half = channel < HALF
    inside = (head < heads)[:, None] & in_half[None, :]
    at = x + head[:, None] * x_head + channel[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + channel, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + channel, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + channel, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + channel, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kind = x.dtype.element_ty
    new_low = (low * cos_low).to(kind).to(tl.float32) + (-high * sin_low).to(kind).to(tl.float32)
    new_high = (high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)
    to = out + head[:, None] * out_head + channel[None, :]
    tl.store(to, new_low.to(kind), mask=inside)
    tl.store(to + HALF, new_high.to(kind), mask=inside)


@triton.jit(do_not_specialize=["tokens", "Hq", "Hk"])
def _rotate_kernel(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    sin_batch,
    tokens,
    Hq,
    Hk,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (B * tokens * head tiles,): the tiles of a token's query heads, then those of its kv heads."""
    q_tiles = tl.cdiv(Hq, BLOCK_H)
    tiles = q_tiles + tl.cdiv(Hk, BLOCK_H)
    tile = tl.program_id(0) % tiles
    place = (tl.program_id(0) // tiles).to(tl.int64)
    batch, token = place // tokens, place % tokens
    cos += batch * cos_batch + token * (2 * HALF)
    sin += batch * sin_batch + token * (2 * HALF)
    if tile < q_tiles:
        q += batch * q_batch + token * q_token
        q_out += batch * q_out_batch + token * q_out_token
        _rotate_heads(q, q_out, q_head, q_out_head, tile * BLOCK_H, Hq, cos, sin, HALF, BLOCK_H, BLOCK_D)
    else:
        k += batch * k_batch + token * k_token
        k_out += batch * k_out_batch + token * k_out_token
        _rotate_heads(k, k_out, k_head, k_out_head, (tile - q_tiles) * BLOCK_H, Hk, cos, sin, HALF, BLOCK_H, BLOCK_D)


def _check_dtypes(**tensors: torch.Tensor) -> None:
    (name, first), *others = tensors.items()
    if first.dtype not in DTYPES:
        raise ValueError(f"{name} is {first.dtype}; the kernels take {', '.join(map(str, DTYPES))}")
    for other, x in others:
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(f"{other} must be {first.dtype} on {first.device} like {name}, not {x.dtype}, {x.device}")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension; see `model_reference.rms_norm`.

    Args:
        x: (..., D), D at most `MAX_NORM_SIZE`; weight: (D,) in x's dtype.

    Returns:
        A contiguous tensor like x.

    Raises:
        ValueError: a shape or dtype that the kernel does not take.
    """
    D = x.shape[-1]
    _check_dtypes(x=x, weight=weight)
    if weight.shape != (D,) or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous ({D},) for x {tuple(x.shape)}, not {tuple(weight.shape)}")
    if D > MAX_NORM_SIZE:
        raise ValueError(f"the kernel takes up to {MAX_NORM_SIZE} channels, not {D}")
    flat = x.reshape(-1, D).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if flat.shape[0] == 0:
        return out
    block_d = triton.next_power_of_2(D)
    block_r = max(1, _NORM_TILE // block_d)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(triton.cdiv(flat.shape[0], block_r),)](
            flat,
            weight,
            out,
            flat.shape[0],
            eps,
            D=D,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=min(16, max(4, block_d // 512)),
        )
    return out


def _rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """(..., D) as (rows, D) by strides, without a copy."""
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError as error:
        raise ValueError(f"{name} {tuple(x.shape)} with strides {x.stride()} is not a matrix of rows") from error
    if rows.stride(1) != 1:
        raise ValueError(f"{name} has the stride {rows.stride(1)} along its last dimension; the kernel takes 1")
    return rows


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up; see `model_reference.swiglu`.

    Args:
        gate, up: (..., D), rows at any distance, as `chunk` leaves them.
        out: where the product goes, `gate` or `up` included; a fresh contiguous tensor when not given.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not take.
    """
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _check_dtypes(gate=gate, up=up, out=out)
    if not gate.shape == up.shape == out.shape:
        raise ValueError(f"gate, up and out differ in shape: {tuple(gate.shape)} {tuple(up.shape)} {tuple(out.shape)}")
    if gate.numel() == 0:
        return out
    gates, ups, outs = _rows("gate", gate), _rows("up", up), _rows("out", out)
    rows, D = gates.shape
    block = min(_SWIGLU_TILE, triton.next_power_of_2(D))
    with torch.cuda.device_of(gate):
        _swiglu_kernel[(rows * triton.cdiv(D, block),)](
            gates, ups, outs, gates.stride(0), ups.stride(0), outs.stride(0), D=D, BLOCK=block, num_warps=4
        )
    return out


def rotate_queries_and_keys(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of both in one launch; see `model_reference.rotate_queries_and_keys`.

    Args:
        q: (B, Hq, t, D); k: (B, Hk, t, D); any strides but 1 along D, D even.
        cos, sin: (B or 1, t, D), contiguous but for the batch.

    Returns:
        New tensors like q and k, in their order of dimensions in memory.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not take.
    """
    _check_dtypes(q=q, k=k, cos=cos, sin=sin)
    B, Hq, t, D = q.shape
    Hk = k.shape[1]
    if k.shape != (B, Hk, t, D) or D % 2:
        raise ValueError(f"q and k must be (B, heads, t, D) with an even D, not {tuple(q.shape)} and {tuple(k.shape)}")
    if not cos.shape == sin.shape or cos.shape[0] not in (1, B) or cos.shape[1:] != (t, D):
        raise ValueError(f"cos and sin must be (1 or {B}, {t}, {D}), not {tuple(cos.shape)} and {tuple(sin.shape)}")
    if not cos[0].is_contiguous() or not sin[0].is_contiguous():
        raise ValueError("cos and sin must be contiguous")
    if q.stride(3) != 1 or k.stride(3) != 1:
        raise ValueError(f"the heads of q and k must be contiguous along D, not {q.stride(3)} and {k.stride(3)} apart")
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if q.numel() == 0:
        return q_out, k_out
    tiles = triton.cdiv(Hq, _HEADS) + triton.cdiv(Hk, _HEADS)
    with torch.cuda.device_of(q):
        _rotate_kernel[(B * t * tiles,)](
            q,
            k,
            q_out,
            k_out,
            cos,
            sin,
            *q.stride()[:3],
            *k.stride()[:3],
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,
            sin.stride(0) if sin.shape[0] > 1 else 0,
            t,
            Hq,
            Hk,
            HALF=D // 2,
            BLOCK_H=_HEADS,
            BLOCK_D=triton.next_power_of_2(D // 2),
            num_warps=4,
            enable_fp_fusion=False,  # a product that is added unrounded would not have the definition's bits
        )
    return q_out, k_out


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Each operation against its definition in float64, on the shapes of an 8B model and on odd ones."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    results = []
    for shape in ((3, 4096), (5, 7, 80)):
        x, weight = draw(*shape) * 3, draw(shape[-1])
        plain = model_reference.rms_norm(x, weight, 1e-5)
        exact = model_reference.rms_norm(x.double(), weight.double(), 1e-5)
        results.append(compare(f"rms_norm {shape}", rms_norm(x, weight, 1e-5), plain, exact))
    gate, up = draw(3, 14336) * 4, draw(3, 14336)
    plain, exact = model_reference.swiglu(gate, up), model_reference.swiglu(gate.double(), up.double())
    results.append(compare("swiglu (3, 14336)", swiglu(gate, up, out=gate), plain, exact))
    q, k = draw(2, 5, 32, 128).transpose(1, 2), draw(2, 5, 8, 128).transpose(1, 2)
    cos, sin = draw(2, 1, 5, 128)
    got = rotate_queries_and_keys(q, k, cos, sin)
    plain = model_reference.rotate_queries_and_keys(q, k, cos, sin)
    exact = model_reference.rotate_queries_and_keys(*(x.double() for x in (q, k, cos, sin)))
    for name, *case in zip("qk", got, plain, exact, strict=True):
        results.append(compare(f"rotate_queries_and_keys {name}", *case))
    return results
