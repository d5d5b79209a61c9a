"""Appending one token per row: the torch definition, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_cuda, run_cases

from kvfactory.kernels.reference import append_tokens


@pytest.mark.parametrize("copies", [1, 3])
def test_definition_by_a_loop(copies):
    R, Hk, D = 3, 2, 5
    g = torch.Generator().manual_seed(copies)
    lengths = torch.randint(1, 9, (R * Hk * copies,), generator=g)
    starts = (lengths + 1).cumsum(0) - lengths - 1
    k, v = torch.randn(2, int((lengths + 1).sum()), D, generator=g)
    k_new, v_new = torch.randn(2, R, Hk, 1, D, generator=g)
    alive = torch.tensor([1, 0, 1])
    want_k, want_v, before = k.clone(), v.clone(), lengths.clone()
    s = 0
    for row in range(R):
        for head in range(Hk):
            for _ in range(copies):
                if alive[row]:
                    want_k[starts[s] + lengths[s]] = k_new[row, head, 0]
                    want_v[starts[s] + lengths[s]] = v_new[row, head, 0]
                s += 1
    append_tokens(k_new, v_new, k, v, starts, lengths, alive, copies=copies)
    assert torch.equal(k, want_k) and torch.equal(v, want_v) and torch.equal(lengths, before)


def test_definition_lets_a_dead_row_be_full():
    k, v = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2)
    new = torch.full((2, 1, 1, 2), -1.0)
    starts, lengths = torch.tensor([0, 2]), torch.tensor([2, 2])
    append_tokens(new, new, k, v, starts, lengths, torch.tensor([False, False]), copies=1)
    assert torch.equal(k, torch.arange(8.0).view(4, 2)) and torch.equal(v, k)


def test_kernel_interpreted():
    run_cases("append_cases.py", interpreted=True)


@pytest.mark.gpu
@needs_cuda
def test_kernel_on_the_gpu():
    run_cases("append_cases.py", interpreted=False)
