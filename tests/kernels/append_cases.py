"""The append kernel on odd shapes, interpreted or on a GPU: see `interpreter`."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, INTERPRETED

from kvfactory.kernels import reference
from kvfactory.kernels.append import append_tokens, check


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("copies, D, integers", [(1, 16, torch.int64), (3, 80, torch.int32), (8, 128, torch.int64)])
def test_equals_the_definition(copies, D, integers, dtype):
    """Every bit of the buffers, from new tokens that are strided as projections leave them; one row is dead."""
    R, Hk = 3, 2
    g = torch.Generator().manual_seed(copies)
    lengths = torch.randint(1, 40, (R * Hk * copies,), generator=g)
    starts = (lengths + 1).cumsum(0) - lengths - 1
    k, v = torch.randn(2, int((lengths + 1).sum()), D, generator=g).to(DEVICE, dtype)
    k_new, v_new = torch.randn(2, R, 1, Hk, 3 * D, generator=g).to(DEVICE, dtype)[..., D : 2 * D].transpose(2, 3)
    where = (starts.to(DEVICE), lengths.to(DEVICE, integers))
    alive = torch.tensor([True, True, False], device=DEVICE)
    want_k, want_v, before = k.clone(), v.clone(), where[1].clone()
    reference.append_tokens(k_new, v_new, want_k, want_v, *where, alive, copies=copies)
    append_tokens(k_new, v_new, k, v, *where, alive, copies=copies)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)
    assert torch.equal(where[1], before)


def test_a_dead_row_may_be_full():
    """Its next slot belongs to the next segment, or lies behind the buffer."""
    k, v = torch.zeros(2, 4, 16, device=DEVICE)
    new = torch.ones(2, 1, 1, 16, device=DEVICE)
    starts, lengths = torch.tensor([0, 2], device=DEVICE), torch.tensor([2, 2], device=DEVICE)
    append_tokens(new, new, k, v, starts, lengths, torch.tensor([False, False], device=DEVICE), copies=1)
    assert not k.any() and not v.any()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies the 4 GiB buffer")
def test_slots_beyond_two_to_the_31_elements():
    slots = 2**31 // 256 + 400
    k = torch.empty(slots, 256, dtype=torch.float16, device=DEVICE)
    new = torch.randn(1, 1, 1, 256, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    starts, lengths = torch.tensor([slots - 3], device=DEVICE), torch.tensor([2], device=DEVICE)
    append_tokens(new, new, k, k, starts, lengths, torch.tensor([1], device=DEVICE), copies=1)
    assert torch.equal(k[-1], new[0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_doctors_checks_pass(dtype):
    for result in check(DEVICE, dtype):
        assert result.passed, result
