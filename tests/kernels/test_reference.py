"""Attention over segments of unequal length against one softmax per segment and query."""

from __future__ import annotations

import pytest
import torch

from kvfactory.kernels.reference import segment_decode


def inputs(lengths, G, D, gap=3, seed=0, dtype=torch.float32):
    """Queries, buffers with `gap` slots of garbage behind each segment, starts and lengths."""
    g = torch.Generator().manual_seed(seed)
    capacities = [n + gap for n in lengths]
    starts = torch.tensor([sum(capacities[:i]) for i in range(len(lengths))])
    q = torch.randn(len(lengths), G, D, generator=g).to(dtype)
    k, v = (torch.full((sum(capacities), D), 1e4, dtype=dtype) for _ in range(2))
    for start, n in zip(starts.tolist(), lengths, strict=True):
        for x in (k, v):
            x[start : start + n] = torch.randn(n, D, generator=g).to(dtype)
    return q, k, v, starts, torch.tensor(lengths)


def reference(q, k, v, starts, lengths, scale):
    """(S, G, D) float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for s, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for g in range(q.shape[1]):
            logits = k[start : start + n].double() @ q[s, g].double() * scale
            out[s, g] = torch.softmax(logits, 0) @ v[start : start + n].double()
    return out


@pytest.mark.parametrize("G", [1, 3, 4])
@pytest.mark.parametrize("D", [64, 80, 96])
@pytest.mark.parametrize("chunk_bytes", [1, 8 * 4 * 96 * 7, 2**28])
def test_equals_a_softmax_per_segment(G, D, chunk_bytes):
    q, k, v, starts, lengths = inputs([1, 31, 32, 33, 8, 100], G, D)
    got = segment_decode(q, k, v, starts, lengths, scale=0.3, chunk_bytes=chunk_bytes)
    # float32 sums of at most 100 products of magnitude 1 to 10.
    torch.testing.assert_close(got.double(), reference(q, k, v, starts, lengths, 0.3), rtol=1e-5, atol=1e-5)


def test_segments_in_any_order_and_with_shared_slots():
    """Starts need not ascend, and several segments may read the same slots."""
    q, k, v, starts, lengths = inputs([4, 9, 2], 2, 16)
    order = torch.tensor([2, 0, 1, 0])
    args = starts[order], lengths[order]
    got = segment_decode(q[order], k, v, *args, scale=0.5)
    torch.testing.assert_close(got.double(), reference(q[order], k, v, *args, 0.5), rtol=1e-5, atol=1e-5)


def test_the_order_of_slots_inside_a_segment_does_not_matter():
    q, k, v, starts, lengths = inputs([20], 3, 16, gap=0)
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    a = segment_decode(q, k, v, starts, lengths, scale=0.5)
    b = segment_decode(q, k[shuffled], v[shuffled], starts, lengths, scale=0.5)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_large_logits_neither_overflow_nor_vanish():
    q, k, v, starts, lengths = inputs([5, 7], 1, 16)
    got = segment_decode(q * 300, k, v, starts, lengths, scale=1.0)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got.double(), reference(q * 300, k, v, starts, lengths, 1.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """One rounding, of the result: off by at most half a unit in the last place of numbers below 4."""
    q, k, v, starts, lengths = inputs([1, 33, 200], 3, 64, dtype=dtype)
    k, v = k.clamp(-5, 5), v.clamp(-5, 5)
    got = segment_decode(q, k, v, starts, lengths, scale=0.125)
    assert got.dtype == dtype
    want = reference(q, k, v, starts, lengths, 0.125)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
