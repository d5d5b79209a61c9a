"""Decode attention kernels on odd shapes, interpreted or on a GPU: see `interpreter`."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, teach_bfloat16

from kvfactory.kernels import reference
from kvfactory.kernels.checks import compare
from kvfactory.kernels.decode_attention import append_and_attend, check, decode_attention
from kvfactory.kernels.segments import DecodeWorkspace

if INTERPRETED:
    teach_bfloat16()

NAN = float("nan")


def segments(lengths, D, dtype, *, gap=2, seed=0):
    """k, v with `gap` slots of NaN behind each segment, starts, lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    starts = (lengths + gap).cumsum(0) - lengths - gap
    k, v = (torch.full((int((lengths + gap).sum()), D), NAN, dtype=dtype) for _ in range(2))
    for start, n in zip(starts.tolist(), lengths.tolist(), strict=True):
        for x in (k, v):
            x[start : start + n] = torch.randn(n, D, generator=g).to(dtype)
    return tuple(x.to(DEVICE) for x in (k, v, starts, lengths))


def queries(S, G, D, dtype, seed=1):
    return torch.randn(S, G, D, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def workspace(S, G, D, splits):
    """Scratch whose contents before the call must not matter."""
    fresh = DecodeWorkspace.allocate(S, G, D, splits=splits, device=DEVICE)
    for x in (fresh.accumulators, fresh.maxima, fresh.sums):
        x.fill_(NAN)
    return fresh


def assert_right(got, q, k, v, starts, lengths, scale):
    plain = reference.decode_by_segment(q, k, v, starts, lengths, scale=scale)
    exact = reference.decode_by_segment(q.double(), k.double(), v.double(), starts, lengths, scale=scale)
    result = compare("", got, plain, exact)
    assert result.passed, result


def bits(x):
    """Comparable also where it is NaN."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "G, D, splits", [(1, 128, 1), (1, 16, 4), (3, 80, 3), (4, 128, 2), (8, 96, 5), (16, 256, 3), (5, 64, 40)]
)
def test_equals_the_definition(G, D, splits, dtype):
    """One token, parts of a tile, several tiles, several programs; output and scratch are NaN beforehand."""
    k, v, starts, lengths = segments([1, 5, 130, 257, 600], D, dtype)
    q = queries(5, G, D, dtype)
    scratch = workspace(5, G, D, splits)
    out = torch.full_like(q, NAN)
    got = decode_attention(q, k, v, starts, lengths, scale=D**-0.5, out=out, workspace=scratch)
    assert got is out
    assert_right(got, q, k, v, starts, lengths, D**-0.5)
    assert not scratch.arrivals.any()


def test_segments_in_any_order_sharing_slots_with_int32_lengths_and_its_own_workspace():
    k, v, starts, lengths = segments([40, 300, 7], 32, torch.float32)
    order = torch.tensor([1, 0, 1, 2, 1], device=DEVICE)
    q = queries(5, 2, 32, torch.float32)
    got = decode_attention(q, k, v, starts[order], lengths[order].int(), scale=0.2)
    assert_right(got, q, k, v, starts[order], lengths[order], 0.2)


def test_a_workspace_serves_call_after_call_while_lengths_change():
    """What a captured graph replays: same buffers, other numbers in them, and arrivals that count from zero again."""
    k, v, starts, lengths = segments([700, 300], 16, torch.float32, gap=300)
    scratch = workspace(2, 4, 16, 4)
    k.nan_to_num_(0.25)
    v.nan_to_num_(0.5)
    for grown in (0, 1, 250):
        q = queries(2, 4, 16, torch.float32, seed=grown)
        got = decode_attention(q, k, v, starts, lengths + grown, scale=0.3, workspace=scratch)
        assert_right(got, q, k, v, starts, lengths + grown, 0.3)


def test_large_logits_neither_overflow_nor_vanish():
    k, v, starts, lengths = segments([5, 400], 16, torch.float32)
    q = queries(2, 1, 16, torch.float32) * 300
    got = decode_attention(q, k, v, starts, lengths, scale=1.0, workspace=workspace(2, 1, 16, 3))
    exact = reference.decode_by_segment(q.double(), k.double(), v.double(), starts, lengths, scale=1.0)
    # Logits up to 5,000 are off by up to 1e-3 in float32, and so is the ratio of two weights.
    torch.testing.assert_close(got.double(), exact, rtol=5e-3, atol=5e-3)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies the 4 GiB buffer")
def test_slots_beyond_two_to_the_31_elements():
    D = 256
    slots = 2**31 // D + 400
    k = torch.empty(slots, D, dtype=torch.float16, device=DEVICE)
    start = slots - 300
    k[start:] = torch.randn(300, D, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    q = queries(1, 2, D, torch.float16)
    starts, lengths = torch.tensor([start], device=DEVICE), torch.tensor([298], device=DEVICE)
    new = torch.ones(1, 1, 1, D, dtype=torch.float16, device=DEVICE)
    alive = torch.ones(1, dtype=torch.bool, device=DEVICE)
    got = append_and_attend(q, new, new, k, k, starts, lengths, alive, copies=1, scale=0.05)
    assert bool((k[start + 298] == 1).all())
    assert_right(got, q, k, k, starts, lengths + 1, 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("copies, splits", [(1, 1), (1, 3), (3, 2)])
def test_fused_append_equals_append_then_attend(copies, splits, dtype):
    """Rows of 2 kv heads, strided new tokens; the second row is dead; full and partial last tiles."""
    R, Hk, D, G = 3, 2, 80, 3
    S = R * Hk * copies
    lengths = [[64, 1, 256, 300, 128, 33, 5][s % 7] for s in range(S)]
    k, v, starts, lengths = segments(lengths, D, dtype, gap=1)
    q = queries(S, G, D, dtype)
    new = torch.randn(2, R, 1, Hk, 2 * D, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    k_new, v_new = new[..., :D].transpose(2, 3)
    alive = torch.tensor([True, False, True], device=DEVICE)
    want_k, want_v, before = k.clone(), v.clone(), lengths.clone()
    reference.append_tokens(k_new, v_new, want_k, want_v, starts, lengths, alive, copies=copies)
    scratch = workspace(S, G, D, splits)
    got = append_and_attend(q, k_new, v_new, k, v, starts, lengths, alive, copies=copies, scale=0.1, workspace=scratch)
    assert torch.equal(bits(k), bits(want_k)) and torch.equal(bits(v), bits(want_v))
    assert torch.equal(lengths, before)
    grown = lengths + alive.repeat_interleave(Hk * copies)
    assert_right(got, q, want_k, want_v, starts, grown, 0.1)


def test_copies_that_share_slots_append_the_same_token():
    D, copies = 16, 4
    k, v, starts, lengths = segments([130, 257], D, torch.float32)
    starts, lengths = starts.repeat_interleave(copies), lengths.repeat_interleave(copies)
    q = queries(2 * copies, 1, D, torch.float32)
    k_new, v_new = torch.randn(2, 1, 2, 1, D, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    alive = torch.ones(1, dtype=torch.int64, device=DEVICE)
    got = append_and_attend(q, k_new, v_new, k, v, starts, lengths, alive, copies=copies, scale=0.3)
    assert torch.equal(k[starts + lengths], k_new[0, :, 0].repeat_interleave(copies, 0))
    assert torch.equal(v[starts + lengths], v_new[0, :, 0].repeat_interleave(copies, 0))
    assert_right(got, q, k, v, starts, lengths + 1, 0.3)


def test_first_token_of_an_empty_row_and_a_dead_empty_row():
    """Rows that wait for a prompt: attention to one's own token is its value, to nothing it is zero."""
    k, v = (torch.full((4, 16), NAN, device=DEVICE) for _ in range(2))
    starts, lengths = torch.tensor([0, 2], device=DEVICE), torch.tensor([0, 0], device=DEVICE)
    k_new, v_new = torch.randn(2, 2, 1, 1, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    q = queries(2, 2, 16, torch.float32)
    alive = torch.tensor([True, False], device=DEVICE)
    got = append_and_attend(q, k_new, v_new, k, v, starts, lengths, alive, copies=1, scale=0.3)
    assert torch.equal(got[0], v_new[0, 0].expand(2, 16))
    assert torch.equal(got[1], torch.zeros(2, 16, device=DEVICE))
    assert bool(k[1:].isnan().all())


def test_the_doctors_checks_pass():
    for result in check(DEVICE, torch.float16):
        assert result.passed, result
