"""Top-k with a fixed rule for ties, against Python's sort."""

from __future__ import annotations

import pytest
import torch
from oracles import best

from kvfactory.methods.base import Kept
from kvfactory.ops.select import gather_tokens, top_positions, with_window


@pytest.mark.parametrize("values", [2, 5, 10_000])
@pytest.mark.parametrize("count", [0, 1, 17, 40, 41])
def test_top_positions(values, count):
    """Few different values make ties the rule; they go to the lower position."""
    g = torch.Generator().manual_seed(values)
    scores = (torch.randint(0, values, (2, 3, 41), generator=g).float() - values // 2) / 7
    got = top_positions(scores, count)
    for b in range(2):
        for h in range(3):
            assert got[b, h].tolist() == best(scores[b, h].tolist(), count)


def test_signed_zeros_infinities_and_tiny_values_order_as_floats():
    row = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, float("inf"), -float("inf"), 3e38, -3e38, 0.0])
    for count in range(len(row) + 1):
        assert top_positions(row, count).tolist() == best([x + 0.0 for x in row.tolist()], count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ties(dtype):
    row = torch.rand(3, 65, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = top_positions(row, 20)
    assert [r.tolist() for r in got] == [best(r.tolist(), 20) for r in row.float()]


def test_with_window_appends_the_last_positions():
    chosen = torch.tensor([[[0, 4], [1, 2]]])
    assert with_window(chosen, 9, 3).tolist() == [[[0, 4, 6, 7, 8], [1, 2, 6, 7, 8]]]
    assert with_window(chosen, 9, 0).tolist() == chosen.tolist()


@pytest.mark.parametrize("heads", [2, 6])
def test_gather_reads_the_kv_head_of_the_group(heads):
    """Stored head h of Hs reads kv head h // (Hs / Hk); the copy is contiguous and its own."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 13, 5, generator=g)
    indices = torch.stack([torch.randperm(13, generator=g)[:7].sort().values for _ in range(2 * heads)]).view(
        2, heads, 7
    )
    got = gather_tokens(x, Kept(indices))
    for b in range(2):
        for h in range(heads):
            assert torch.equal(got[b, h], x[b, h // (heads // 2)][indices[b, h]])
    assert got.is_contiguous() and got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
