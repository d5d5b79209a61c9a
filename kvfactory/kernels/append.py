"""One new token per row into every segment of that row, where the device lengths say."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvfactory.kernels.checks import Check, equal
from kvfactory.kernels.segments import check_new_tokens, check_segments


@triton.jit
def _append_kernel(
    k_new,  # (R, Hk, D) by strides
    v_new,
    k,  # (slots, D)
    v,
    starts,  # (S,)
    lengths,
    alive,  # (R,)
    k_row,
    k_head,
    v_row,
    v_head,
    heads,  # Hk
    COPIES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row = s // COPIES // heads
    head = s // COPIES % heads
    offs = tl.arange(0, BLOCK_D)
    in_d = offs < D
    if tl.load(alive + row).to(tl.int32) != 0:
        slot = (tl.load(starts + s).to(tl.int64) + tl.load(lengths + s)) * D
        key = tl.load(k_new + row * k_row + head * k_head + offs, mask=in_d)
        value = tl.load(v_new + row * v_row + head * v_head + offs, mask=in_d)
        tl.store(k + slot + offs, key, mask=in_d)
        tl.store(v + slot + offs, value, mask=in_d)


def append_tokens(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    alive: torch.Tensor,
    *,
    copies: int,
) -> None:
    """Writes the new token of each row behind all its segments, in place; `lengths` stay as they are.

    Args:
        k_new, v_new: (R, Hk, 1, D); rows and heads may be strided.
        k, v: (slots, D) in the same dtype, with a free slot at starts[s] + lengths[s].
        starts, lengths: (S,) with S = R * Hk * copies, ordered by row, kv head, copy; int64, lengths int32 or int64.
            Segments that share slots write the same value twice.
        alive: (R,) bool or integers; a dead row writes nothing, so it needs no free slot.
        copies: segments per kv head: 1, or Hq / Hk where query heads are stored.

    Raises:
        ValueError: a shape, dtype or layout that the kernel does not take.
    """
    check_segments(k, v, starts, lengths)
    check_new_tokens(k_new, v_new, k, starts, alive, copies)
    D = k.shape[1]
    with torch.cuda.device_of(k):
        _append_kernel[(starts.shape[0],)](
            k_new,
            v_new,
            k,
            v,
            starts,
            lengths,
            alive,
            k_new.stride(0),
            k_new.stride(1),
            v_new.stride(0),
            v_new.stride(1),
            k_new.shape[1],
            COPIES=copies,
            D=D,
            BLOCK_D=triton.next_power_of_2(D),
            num_warps=1,
        )


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Appends to unequal segments of rows with copies, one row dead, against the definition; copies are exact."""
    from kvfactory.kernels import reference

    results = []
    for copies, D in ((1, 128), (4, 80)):
        random = torch.Generator().manual_seed(D)
        lengths = torch.randint(1, 300, (3 * 2 * copies,), generator=random)
        starts = (lengths + 2).cumsum(0) - lengths - 2
        k, v = (torch.randn(int((lengths + 2).sum()), D, generator=random).to(device, dtype) for _ in range(2))
        new = torch.randn(2, 3, 1, 2, D, generator=random).to(device, dtype).transpose(2, 3)
        alive = torch.tensor([True, False, True], device=device)
        arguments = (starts.to(device), lengths.to(device), alive)
        want_k, want_v = k.clone(), v.clone()
        reference.append_tokens(*new, want_k, want_v, *arguments, copies=copies)
        append_tokens(*new, k, v, *arguments, copies=copies)
        results.append(equal(f"append_tokens copies={copies} D={D}, keys", k, want_k))
        results.append(equal(f"append_tokens copies={copies} D={D}, values", v, want_v))
    return results
