"""Kept rows of a prompt's keys and values, straight from the prompt's tensors to their slots, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvfactory.kernels.checks import Check, equal

_TILE = 2048
"""Numbers that a program copies of each source: 16 rows at head_dim 128."""


@triton.jit
def _places(batch, head, position, offs_d, batch_stride, head_stride, position_stride, d_stride):
    row = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + position * position_stride
    return row[:, None] + offs_d[None, :] * d_stride


@triton.jit(do_not_specialize=["N", "segments", "length", "slack"])  # prompts differ in them
def _gather_kernel(
    a,  # (B, Hk, S, D) by strides
    b,
    indices,  # (N,)
    ends,  # (segments,), or nothing where every segment has `length` rows
    to_a,  # (slots, D)
    to_b,
    a_batch,
    a_head,
    a_position,
    a_d,
    b_batch,
    b_head,
    b_position,
    b_d,
    N,
    segments,
    length,
    slack,
    heads,  # Hk
    copies,  # segments per kv head
    D: tl.constexpr,
    RAGGED: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    if RAGGED:
        segment = tl.zeros((BLOCK_N,), tl.int32)
        for first in range(0, segments, BLOCK_S):
            offs_s = first + tl.arange(0, BLOCK_S)
            end = tl.load(ends + offs_s, mask=offs_s < segments, other=N)
            segment += tl.sum((end[None, :] <= rows[:, None]).to(tl.int32), axis=1)
        inside &= segment < segments
    else:
        segment = rows // length
    position = tl.load(indices + rows, mask=inside, other=0).to(tl.int64)
    batch = segment // copies // heads
    head = segment // copies % heads
    offs_d = tl.arange(0, BLOCK_D)
    held = inside[:, None] & (offs_d < D)[None, :]
    slots = (rows + segment * slack).to(tl.int64)[:, None] * D + offs_d[None, :]
    # Both loads before a store, so that they are under way together.
    x = tl.load(a + _places(batch, head, position, offs_d, a_batch, a_head, a_position, a_d), mask=held)
    if PAIR:
        y = tl.load(b + _places(batch, head, position, offs_d, b_batch, b_head, b_position, b_d), mask=held)
        tl.store(to_b + slots, y, mask=held)
    tl.store(to_a + slots, x, mask=held)


def gather_kept(
    sources: Sequence[torch.Tensor],
    indices: torch.Tensor,
    targets: Sequence[torch.Tensor],
    *,
    slack: int,
    ends: torch.Tensor | None = None,
) -> None:
    """Copies rows of one or two sources to their slots, without waiting for the device.

    Args:
        sources: (B, Hk, S, D) alike, at any strides, any D and dtype.
        indices: (B, Hs, n), or with `ends` (N,): positions, segment after segment. Segment s of B * Hs reads kv head
            s // (Hs / Hk), and its rows lie `slack * s` slots further on in the target than here.
        targets: contiguous (slots, D), one per source, in its dtype. Slack is not touched.
        ends: (B * Hs,) int64 where segments end in `indices`; what lies behind the last one is not read.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not take.
    """
    if len(sources) not in (1, 2) or len(targets) != len(sources):
        raise ValueError(f"the kernel copies one source or two to as many targets, not {len(sources)}, {len(targets)}")
    B, Hk, _, D = sources[0].shape
    segments = indices.shape[0] * indices.shape[1] if ends is None else ends.numel()
    N, source, target = indices.numel(), sources[0], targets[0]
    for x, y in zip(sources, targets, strict=True):
        if x.shape != source.shape or y.shape[1:] != (D,) or not y.is_contiguous() or y.dtype != x.dtype:
            raise ValueError(
                f"sources must be (B, Hk, S, D) alike, not {tuple(source.shape)} and {tuple(x.shape)}, and targets "
                f"contiguous (slots, D) in their {x.dtype}, not {tuple(y.shape)} {y.dtype}"
            )
        if not N + slack * segments <= len(y) < 2**31:
            raise ValueError(f"{N} rows and {slack} free slots behind {segments} segments do not fit {len(y)} slots")
    if segments % (B * Hk):
        raise ValueError(f"{segments} segments are not a multiple of {B} rows of {Hk} kv heads")
    if ends is not None and not ends.is_contiguous():
        raise ValueError("ends must be contiguous")
    BLOCK_D = triton.next_power_of_2(D)
    BLOCK_N = max(1, _TILE // BLOCK_D)
    with torch.cuda.device_of(source):
        _gather_kernel[(triton.cdiv(N, BLOCK_N),)](
            source,
            sources[-1],
            indices.contiguous(),
            ends,
            target,
            targets[-1],
            *source.stride(),
            *sources[-1].stride(),
            N,
            segments,
            indices.shape[-1],
            slack,
            Hk,
            segments // (B * Hk),
            D=D,
            RAGGED=ends is not None,
            PAIR=len(sources) == 2,
            BLOCK_N=BLOCK_N,
            BLOCK_S=32,
            BLOCK_D=BLOCK_D,
        )


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Dense and ragged rows from strided keys and values into slack that says -1, against the definition, exactly."""
    from kvfactory.kernels import reference

    results = []
    for copies, D in ((1, 128), (4, 80)):
        random = torch.Generator().manual_seed(D)
        prompt = torch.randn(2, 1, 300, 3, D, generator=random).to(device, dtype).transpose(2, 3)
        order = torch.rand(3 * copies, 300, generator=random).argsort(-1)
        lengths = torch.randint(1, 300, (3 * copies,), generator=random)
        ragged = torch.cat([row[:n].sort().values for row, n in zip(order, lengths.tolist(), strict=True)])
        cases = (
            ("dense", order[None, :, :77].sort().values, None),
            ("ragged", ragged, lengths.cumsum(0).to(device)),
        )
        for layout, indices, ends in cases:
            got, want = (torch.full((2, indices.numel() + 3 * copies * 5, D), -1.0).to(device, dtype) for _ in range(2))
            gather_kept(prompt, indices.to(device), got, slack=5, ends=ends)
            reference.gather_kept(prompt, indices.to(device), want, slack=5, ends=ends)
            results.append(equal(f"gather_kept {layout} copies={copies} D={D}", got, want))
    return results
