"""Attention of one new token over segments of keys and values, split along the sequence (flash-decoding, Dao 2023).

A segment's tokens are shared out among `splits` programs by the length read on the device, so that no call waits for
the host and a captured graph stays right while segments grow. Each program leaves its running maximum, sum and weighted
values; the last one to arrive joins them. Definition: `kvfactory.kernels.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfactory.kernels.checks import Check, compare, equal
from kvfactory.kernels.segments import (
    MAX_GROUP,
    TOKENS_PER_SPLIT,
    DecodeWorkspace,
    check_new_tokens,
    check_segments,
    make_workspace,
)

_TILE_BYTES = 16 * 1024
_STAGES = 3  # tiles of keys and of values under way: 70 KiB, so that three programs fit on a Hopper multiprocessor
_LOG2_E = 1.4426950408889634


@triton.jit
def _decode_kernel(
    q,  # (S, G, D)
    k,  # (slots, D)
    v,
    starts,  # (S,)
    lengths,
    out,  # (S, G, D)
    accumulators,  # (S, splits, G, D) float32, not yet divided by their sums
    maxima,  # (S, splits, G) float32, of logits in base 2
    sums,
    arrivals,  # (S,) int32, zero before and after
    k_new,  # (R, Hk, D) by strides; unused unless APPENDS
    v_new,
    alive,  # (R,)
    k_row,
    k_head,
    v_row,
    v_head,
    heads,  # Hk
    scale,  # of base-2 logits
    APPENDS: tl.constexpr,
    COPIES: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    JOIN_G: tl.constexpr,
    JOIN_N: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    start = tl.load(starts + s).to(tl.int64)
    length = tl.load(lengths + s).to(tl.int32)
    blocks = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
    share = tl.maximum(tl.cdiv(blocks, splits), MIN_BLOCKS)
    used = tl.cdiv(blocks, share)
    if split >= used:
        return

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    in_g = offs_g < G
    in_d = offs_d < D
    queries = tl.load(
        q + (s * G + offs_g[:, None]) * D + offs_d[None, :], mask=in_g[:, None] & in_d[None, :], other=0.0
    )

    top = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    tile = offs_n[:, None] * D + offs_d[None, :]
    first = split * share * BLOCK_N
    last = tl.minimum(first + share * BLOCK_N, length)
    for n in tl.range(first, last, BLOCK_N):
        inside = n + offs_n < last
        held = inside[:, None] & in_d[None, :]
        base = (start + n) * D
        keys = tl.load(k + base + tile, mask=held, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(inside[None, :], logits, -float("inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        # What lies behind a segment may be NaN, and 0 * NaN would spread: masked values are zeros.
        values = tl.load(v + base + tile, mask=held, other=0.0)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    if APPENDS:
        row = s // COPIES // heads
        head = s // COPIES % heads
        if split == used - 1:
            if tl.load(alive + row).to(tl.int32) != 0:
                new_key = tl.load(k_new + row * k_row + head * k_head + offs_d, mask=in_d, other=0.0)
                new_value = tl.load(v_new + row * v_row + head * v_head + offs_d, mask=in_d, other=0.0)
                # Segments that share slots write the same value; nobody reads this slot before the next launch.
                slot = (start + length) * D
                tl.store(k + slot + offs_d, new_key, mask=in_d)
                tl.store(v + slot + offs_d, new_value, mask=in_d)
                logit = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scale
                new_top = tl.maximum(top, logit)
                weight = tl.exp2(logit - new_top)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + weight
                acc = acc * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
                top = new_top

    if used == 1:
        # A dead row without tokens has a zero sum: its output is zeros rather than NaN.
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (s * G + offs_g[:, None]) * D + offs_d[None, :],
            result.to(out.dtype.element_ty),
            mask=in_g[:, None] & in_d[None, :],
        )
        return

    part = (s * splits + split) * G + offs_g
    tl.store(maxima + part, top, mask=in_g)
    tl.store(sums + part, total, mask=in_g)
    tl.store(accumulators + part[:, None] * D + offs_d[None, :], acc, mask=in_g[:, None] & in_d[None, :])
    # All threads' stores come before the one thread's arrival, which publishes them to the whole device.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + s, 1, sem="acq_rel", scope="gpu")
    if arrived == used - 1:
        join_g = tl.arange(0, JOIN_G)
        join_n = tl.arange(0, JOIN_N)
        top_j = tl.full([JOIN_G], -float("inf"), tl.float32)
        total_j = tl.zeros([JOIN_G], tl.float32)
        acc_j = tl.zeros([JOIN_G, BLOCK_D], tl.float32)
        for j in tl.range(0, used, JOIN_N):
            there = (j + join_n < used)[:, None] & (join_g < G)[None, :]
            part_j = (s * splits + j + join_n[:, None]) * G + join_g[None, :]
            # .cg reads the L2: other multiprocessors wrote these.
            top_n = tl.load(maxima + part_j, mask=there, other=-float("inf"), cache_modifier=".cg")
            total_n = tl.load(sums + part_j, mask=there, other=0.0, cache_modifier=".cg")
            acc_n = tl.load(
                accumulators + part_j[:, :, None] * D + offs_d[None, None, :],
                mask=there[:, :, None] & in_d[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            top_n = tl.where((join_g < G)[None, :], top_n, 0.0)
            new_top = tl.maximum(top_j, tl.max(top_n, axis=0))
            shrink = tl.exp2(top_j - new_top)
            weight = tl.exp2(top_n - new_top[None, :])
            total_j = total_j * shrink + tl.sum(total_n * weight, axis=0)
            acc_j = acc_j * shrink[:, None] + tl.sum(acc_n * weight[:, :, None], axis=0)
            top_j = new_top
        joined = acc_j / tl.where(join_g < G, total_j, 1.0)[:, None]
        tl.store(
            out + (s * G + join_g[:, None]) * D + offs_d[None, :],
            joined.to(out.dtype.element_ty),
            mask=(join_g < G)[:, None] & in_d[None, :],
        )
        tl.store(arrivals + s, 0)


def _launch(q, k, v, starts, lengths, scale, out, workspace, new):
    check_segments(k, v, starts, lengths)
    S, G, D = q.shape
    if S != starts.shape[0] or D != k.shape[1] or q.dtype != k.dtype:
        raise ValueError(
            f"q must be ({starts.shape[0]}, G, {k.shape[1]}) {k.dtype} like k, not {tuple(q.shape)} {q.dtype}"
        )
    if not 1 <= G <= MAX_GROUP:
        raise ValueError(f"the kernel takes 1 to {MAX_GROUP} query heads per segment, not {G}")
    q = q.contiguous()
    if out is None:
        out = torch.empty_like(q)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {tuple(q.shape)} {q.dtype}, not {tuple(out.shape)} {out.dtype}")
    if workspace is None:
        workspace = make_workspace(S, G, D, capacity=k.shape[0], device=q.device)
    splits = workspace.maxima.shape[1]
    if workspace.accumulators.shape != (S, splits, G, D):
        raise ValueError(
            f"the workspace is for {tuple(workspace.accumulators.shape)} (S, splits, G, D), q is {(S, G, D)}"
        )
    if new is None:
        new_arguments, heads, copies = (k, v, lengths, 0, 0, 0, 0), 1, 1
    else:
        k_new, v_new, alive, copies = new
        check_new_tokens(k_new, v_new, k, starts, alive, copies)
        strides = (k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1))
        new_arguments, heads = (k_new, v_new, alive, *strides), k_new.shape[1]
    block_d = max(16, triton.next_power_of_2(D))
    block_n = min(128, max(16, _TILE_BYTES // (block_d * k.element_size())))
    join_g = triton.next_power_of_2(G)
    with torch.cuda.device_of(q):
        _decode_kernel[(S, splits)](
            q,
            k,
            v,
            starts,
            lengths,
            out,
            workspace.accumulators,
            workspace.maxima,
            workspace.sums,
            workspace.arrivals,
            *new_arguments,
            heads,
            scale * _LOG2_E,
            APPENDS=new is not None,
            COPIES=copies,
            G=G,
            D=D,
            BLOCK_G=MAX_GROUP,
            BLOCK_D=block_d,
            BLOCK_N=block_n,
            MIN_BLOCKS=-(-TOKENS_PER_SPLIT // block_n),
            JOIN_G=join_g,
            JOIN_N=max(1, 8192 // (join_g * block_d)),
            num_warps=8 if k.dtype == torch.float32 else 4,  # float32 products take registers that four warps lack
            num_stages=_STAGES,
        )
    return out


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Attention of G queries per segment over that segment's slots.

    Args:
        q: (S, G, D), G at most 16, D at most 256; float16, bfloat16 or float32.
        k, v: (slots, D) in q's dtype; segment s owns the slots starts[s] .. starts[s] + lengths[s] - 1. Segments may
            share slots; what lies outside them is never read.
        starts: (S,) int64; lengths: (S,) int32 or int64, at least 1. Read on the device only.
        out: where the result goes; a fresh tensor when not given.
        workspace: from `make_workspace`, for repeated calls and graphs; a fresh one when not given.

    Returns:
        (S, G, D) in q's dtype, softmax and sums in float32.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not take.
    """
    return _launch(q, k, v, starts, lengths, scale, out, workspace, None)


def append_and_attend(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    alive: torch.Tensor,
    *,
    copies: int,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """`append_tokens`, then `decode_attention` over `lengths + alive` tokens, in one launch.

    Args, beyond those of the two:
        lengths: (S,) before the append, and unchanged by it: the caller advances all layers' lengths once per step.

    Returns:
        (S, G, D); zeros for a dead row that holds nothing.
    """
    return _launch(q, k, v, starts, lengths, scale, out, workspace, (k_new, v_new, alive, copies))


_CHECKED_SHAPES = ((1, 128), (4, 128), (7, 80))  # few, since every shape and dtype is compiled anew


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Both entries against the definition in float64, on segments of very different length, two of them shared."""
    from kvfactory.kernels import reference

    results = []
    for G, D in _CHECKED_SHAPES:
        random = torch.Generator().manual_seed(G * D)
        longest = 16384 if device.type == "cuda" else 300  # the interpreter takes minutes for long segments
        lengths = torch.tensor([1, 5, 130, 257, 1025, 1025, longest, 3])
        capacities = lengths + 3
        starts = capacities.cumsum(0) - capacities
        starts[5] = starts[4]
        heads = torch.tensor([0, 1, 2, 3, 4, 4, 6, 7])  # shared slots take the same new token
        q = torch.randn(len(lengths), G, D, generator=random).to(device, dtype)
        k, v = (torch.randn(int(capacities.sum()), D, generator=random).to(device, dtype) for _ in range(2))
        new = torch.randn(2, len(lengths), 1, 1, D, generator=random)[:, heads].to(device, dtype)
        alive = torch.ones(len(lengths), dtype=torch.bool, device=device)
        starts, lengths = starts.to(device), lengths.to(device)
        name, scale = f"G={G} D={D}", D**-0.5

        got = decode_attention(q, k, v, starts, lengths, scale=scale)
        plain, exact = (reference.decode_by_segment(x, *y, starts, lengths, scale=scale) for x, y in _both(q, k, v))
        results.append(compare(f"decode_attention {name}", got, plain, exact))

        k_fused, v_fused = k.clone(), v.clone()
        got = append_and_attend(q, *new, k_fused, v_fused, starts, lengths, alive, copies=1, scale=scale)
        reference.append_tokens(*new, k, v, starts, lengths, alive, copies=1)
        plain, exact = (reference.decode_by_segment(x, *y, starts, lengths + 1, scale=scale) for x, y in _both(q, k, v))
        results.append(compare(f"append_and_attend {name}", got, plain, exact))
        results.append(equal(f"append_and_attend {name}, keys", k_fused, k))
        results.append(equal(f"append_and_attend {name}, values", v_fused, v))
    return results


def _both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """The inputs as they are and in float64."""
    return (q, (k, v)), (q.double(), (k.double(), v.double()))
