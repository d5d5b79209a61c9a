"""Kept rows from the prompt into the store's slots: the torch definition, and the kernel against it."""

from __future__ import annotations

import pytest
import torch
from gathering import dense_kept, empty_slots, prompt, ragged_kept
from interpreter import needs_cuda, run_cases

from kvfactory.kernels.reference import gather_kept


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("copies", [1, 3])
def test_dense_definition_by_a_loop(copies, slack):
    """Every slot: the kept rows, and the slack as it was, which is NaN."""
    (k, v), kept = prompt(2, 2, 17, 5), dense_kept(2, 2 * copies, 17, 7)
    got = empty_slots(2, kept.numel() + 2 * 2 * copies * slack, 5)
    gather_kept((k, v), kept, got, slack=slack)
    for x, buffer in zip((k, v), got, strict=True):
        heads = buffer.view(2, 2 * copies, 7 + slack, 5)
        for b in range(2):
            for h in range(2 * copies):
                assert torch.equal(heads[b, h, :7], x[b, h // copies][kept[b, h]])
                assert heads[b, h, 7:].isnan().all()


@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("copies", [1, 3])
def test_ragged_definition_by_a_loop(copies, slack, spare):
    (k, v), (kept, ends) = prompt(2, 2, 17, 5), ragged_kept(4 * copies, 17, spare)
    got = empty_slots(2, kept.numel() + 4 * copies * slack, 5)
    gather_kept((k, v), kept, got, slack=slack, ends=ends)
    for x, buffer in zip((k, v), got, strict=True):
        first = slot = 0
        for s, end in enumerate(ends.tolist()):
            n = end - first
            assert torch.equal(buffer[slot : slot + n], x.flatten(0, 1)[s // copies][kept[first:end]])
            assert buffer[slot + n : slot + n + slack].isnan().all()
            first, slot = end, slot + n + slack


def test_kernel_interpreted():
    run_cases("gather_cases.py", interpreted=True)


@pytest.mark.gpu
@needs_cuda
def test_kernel_on_the_gpu():
    run_cases("gather_cases.py", interpreted=False)
