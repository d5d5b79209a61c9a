from __future__ import annotations

import pytest
import torch

from kvfactory.ops.row_statistics import low_weight_counts, lowest_positions, unmasked_sums
from kvfactory.ops.scores import column_sums


def random_qk(B: int, Hq: int, Hk: int, S: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(B, Hq, S, D, generator=g), torch.randn(B, Hk, S, D, generator=g)


def dense(q, k, causal=True):
    S = q.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = (q.double() @ k.double().transpose(2, 3)) * q.shape[3] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(dim=-1)


@pytest.mark.parametrize("first_row, block_bytes", [(0, 1), (0, 2**30), (23, 4 * 12 * 31 * 3), (30, 1)])
def test_counts_equal_dense_attention_against_an_even_share(first_row, block_bytes):
    q, k = random_qk(2, 6, 2, 31, 8)
    rows = dense(q, k)
    share = 1 / torch.arange(1, 32, dtype=torch.float64)
    low = (rows < share[:, None]) & torch.ones(31, 31, dtype=torch.bool).tril()
    counts, sums = low_weight_counts(q, k, scale=8**-0.5, first_row=first_row, block_bytes=block_bytes)
    assert torch.equal(counts, low[:, :, first_row:].sum(dim=2))
    torch.testing.assert_close(sums.double(), rows[:, :, first_row:].sum(dim=2), rtol=1e-5, atol=1e-6)  # float32
    assert counts.min() >= 0 and counts.max() <= 31 - first_row


def test_an_even_row_counts_nothing_as_low():
    q, k = random_qk(1, 2, 1, 300, 8)
    counts, _ = low_weight_counts(torch.zeros_like(q), k, scale=1.0, first_row=0)
    assert counts.sum() == 0


@pytest.mark.parametrize("first_row, block_bytes", [(0, 1), (19, 4 * 12 * 31 * 4)])
def test_unmasked_rows_see_the_whole_prompt(first_row, block_bytes):
    q, k = random_qk(2, 6, 2, 31, 8)
    got = unmasked_sums(q, k, scale=8**-0.5, first_row=first_row, block_bytes=block_bytes)
    torch.testing.assert_close(got.double(), dense(q, k, causal=False)[:, :, first_row:].sum(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.sum(dim=-1), torch.full((2, 6), 31.0 - first_row), rtol=1e-5, atol=0)


def test_the_last_row_alone_is_the_same_with_and_without_the_mask():
    q, k = random_qk(1, 4, 2, 30, 8)
    causal = column_sums(q, k, scale=0.5, first_row=29)
    # The two paths run the same products in different shapes: a few units in the last place.
    torch.testing.assert_close(unmasked_sums(q, k, scale=0.5, first_row=29), causal, rtol=1e-6, atol=1e-8)


def test_lowest_positions_are_lexicographic():
    g = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (2, 3, 40), generator=g).float()
    sums = torch.randint(0, 4, (2, 3, 40), generator=g) / 4
    got = lowest_positions(counts, sums, 17)
    for b in range(2):
        for h in range(3):
            ordered = sorted(range(40), key=lambda j: (counts[b, h, j].item(), -sums[b, h, j].item(), -j))
            assert got[b, h].tolist() == sorted(ordered[:17])


def test_sums_that_one_rounded_key_would_confuse_still_decide():
    counts = torch.full((1, 1, 3), 400.0)
    sums = torch.tensor([[[1e-12, 3e-12, 2e-12]]])
    assert lowest_positions(counts, sums, 1).tolist() == [[[1]]]
    assert lowest_positions(counts, sums, 2).tolist() == [[[1, 2]]]
