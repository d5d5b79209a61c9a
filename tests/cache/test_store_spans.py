"""What stores take over and what they leave alone: spans that fit exactly, and the lengths that a method gave."""

from __future__ import annotations

import pytest
import torch

from kvfactory.cache.ragged import RaggedStore
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import Kept, RaggedKept

D, SLACK = 12, 2


def prompt():
    return torch.randn(2, 1, 2, 9, D, generator=torch.Generator().manual_seed(0))


def build(kind, k, v, span=None):
    if kind == "dense":
        return DenseStore(k, v, SLACK, span, kept=Kept(torch.arange(2, 7).expand(1, 2, 5)))
    return RaggedStore.build(k, v, RaggedKept(torch.arange(9), torch.tensor([3, 6])), SLACK, span)


@pytest.mark.parametrize("kind, slots", [("dense", 2 * (5 + SLACK)), ("ragged", 9 + 2 * SLACK)])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_span_is_taken_when_it_has_just_enough_slots(kind, slots, missing):
    k, v = prompt()
    span = torch.full((slots - missing, D), torch.nan), torch.full((slots - missing, D), torch.nan)
    store = build(kind, k, v, span)
    taken = [x.data_ptr() == y.data_ptr() for x, y in zip(store.buffers, span, strict=True)]
    assert taken == [not missing] * 2 and store.room == SLACK
    if missing:
        assert all(x.isnan().all() for x in span)
    for got, want in zip(store.view(), build(kind, k, v).view(), strict=True):
        assert torch.equal(got.nan_to_num(), want)  # behind a ragged segment a span holds what it held


def test_appending_leaves_the_lengths_of_the_method_alone():
    k, v = prompt()
    kept = RaggedKept(torch.arange(9), torch.tensor([3, 6]))
    store = RaggedStore.build(k, v, kept, SLACK)
    store.append(k[:, :, :1], v[:, :, :1])
    assert store.lengths.host.tolist() == [[4, 7]] and store.prompt_lengths.host.tolist() == [[3, 6]]
    assert kept.lengths.tolist() == [3, 6]
