from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvfactory.ops.adaptive import (
    flat_ranking_counts,
    mix_with_uniform,
    ragged_positions,
    rank_tokens,
    retained_mass,
    window_means,
)


def random_scores(B: int, Hs: int, P: int, seed: int = 0, tied: bool = False) -> torch.Tensor:
    """Scores of heads with different peakedness; `tied` makes most of them equal to another one."""
    g = torch.Generator().manual_seed(seed)
    sharpness = torch.rand(B, Hs, 1, generator=g) * 4
    scores = (torch.randn(B, Hs, P, generator=g) * sharpness).softmax(dim=-1)
    return (scores * 40).round() / 40 if tied else scores


def ranked(scores: torch.Tensor) -> torch.Tensor:
    return rank_tokens(scores).scores


def counts_by_loop(scores: torch.Tensor, base: int, normalize: bool, protected: int) -> list[list[int]]:
    """One token at a time: the best one left in all heads; equal scores go to the lower head."""
    out = []
    for row in scores.double().tolist():
        queues = []
        for head in row:
            ordered = sorted(head, reverse=True)
            if normalize:
                ratio = sum(ordered[:base]) / sum(ordered)
                ordered = [x * ratio for x in ordered]
            queues.append(ordered)
        taken = [protected] * len(row)
        while sum(taken) < base * len(row):
            heads = [h for h in range(len(row)) if taken[h] < len(queues[h])]
            best = max(heads, key=lambda h: (queues[h][taken[h]], -h))
            taken[best] += 1
        out.append(taken)
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("protected", [0, 3])
@pytest.mark.parametrize("B, Hs, P, base", [(1, 1, 9, 4), (2, 5, 37, 11), (1, 9, 50, 50), (2, 3, 8, 3)])
def test_flat_ranking_equals_taking_tokens_one_by_one(B, Hs, P, base, protected, tied):
    scores = random_scores(B, Hs, P, tied=tied)
    counts = flat_ranking_counts(ranked(scores), base, protected=protected)
    assert counts.tolist() == counts_by_loop(scores, base, False, protected)
    assert counts.sum(dim=1).tolist() == [Hs * base] * B


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision_of_any_layout_count_as_their_float32_values(dtype):
    """The weight of a head is never rounded to the scores' dtype, where different scores would tie."""
    scores = random_scores(2, 7, 301, seed=5).to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    assert not scores.is_contiguous()
    got = flat_ranking_counts(ranked(scores), 90, normalize=True, protected=2)
    assert got.tolist() == counts_by_loop(scores.float(), 90, True, 2)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_ranking_is_left_as_it_was(normalize):
    ranking = ranked(random_scores(1, 3, 11))
    before = ranking.clone()
    flat_ranking_counts(ranking, 4, normalize=normalize, protected=2)
    assert torch.equal(ranking, before)


def test_nothing_to_share_out_leaves_nothing_to_any_head():
    assert flat_ranking_counts(ranked(random_scores(2, 3, 9)), 0, normalize=True).tolist() == [[0] * 3] * 2


def test_normalising_weighs_a_head_by_the_mass_its_best_tokens_hold():
    scores = random_scores(2, 7, 41, seed=3)
    assert flat_ranking_counts(ranked(scores), 12, normalize=True).tolist() == counts_by_loop(scores, 12, True, 0)
    assert flat_ranking_counts(ranked(scores), 12, normalize=True).tolist() != counts_by_loop(scores, 12, False, 0)


def test_retained_mass_by_hand():
    scores = torch.tensor([[[1.0, 3.0, 4.0, 2.0], [0.0, 0.0, 0.0, 0.0]]])
    assert retained_mass(ranked(scores), 2).tolist() == [[[pytest.approx(0.7)], [0.0]]]


def test_permuting_heads_permutes_counts():
    scores = random_scores(1, 6, 30, seed=1)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    counts = flat_ranking_counts(ranked(scores), 8)
    assert flat_ranking_counts(ranked(scores[:, order]), 8).tolist() == counts[:, order].tolist()


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.29, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("base", [1, 7, 56, 100])
def test_rounded_mix_loses_only_what_rounding_explains(base, floor):
    counts = flat_ranking_counts(ranked(random_scores(2, 9, 120, seed=base)), base)
    mixed = mix_with_uniform(counts, base, floor)
    lost = base * floor - int(base * floor)
    for row, adaptive in zip(mixed.tolist(), counts.tolist(), strict=True):
        assert abs(sum(row) - 9 * base + 9 * lost) <= 9 / 2 + 1e-3  # float32 rounding of the product
        assert all(
            abs(c - (m * (1 - floor) + int(base * floor))) <= 0.5 + 1e-4 for c, m in zip(row, adaptive, strict=True)
        )
        assert all(int(base * floor) - 1 <= c <= 120 for c in row)


def test_rounded_mix_rounds_half_to_even():
    assert mix_with_uniform(torch.tensor([[1, 3, 5, 7]]), 4, 0.5).tolist() == [[2, 4, 4, 6]]  # 2.5, 3.5, 4.5, 5.5


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.29, 1 / 3, 1.0])
@pytest.mark.parametrize("base", [1, 7, 56, 100])
def test_exact_mix_conserves_the_budget(base, floor):
    counts = flat_ranking_counts(ranked(random_scores(2, 9, 120, seed=base)), base)
    mixed = mix_with_uniform(counts, base, floor, "exact")
    assert mixed.sum(dim=1).tolist() == [9 * base] * 2
    share = Fraction(repr(float(floor))).limit_denominator(10**6)
    for row, adaptive in zip(mixed.tolist(), counts.tolist(), strict=True):
        assert all(abs(c - (m * (1 - share) + base * share)) < 1 for c, m in zip(row, adaptive, strict=True))


def test_exact_mix_gives_ties_to_the_lower_head():
    # Targets 2.5 each way: the two extra tokens go to the largest remainders, lower head first.
    assert mix_with_uniform(torch.tensor([[1, 3, 5, 7]]), 4, 0.5, "exact").tolist() == [[3, 4, 4, 5]]


def test_ragged_positions_equal_a_stable_sort_per_head():
    B, Hs, P, window = 2, 5, 33, 4
    scores = random_scores(B, Hs, P, seed=2, tied=True)
    counts = torch.tensor([[0, 33, 1, 7, 20], [5, 0, 0, 32, 2]])
    indices, lengths = ragged_positions(rank_tokens(scores).order, counts, window)
    assert lengths.tolist() == (counts.flatten() + window).tolist()
    for segment, row, count in zip(
        indices.split(lengths.tolist()), scores.flatten(0, 1), counts.flatten().tolist(), strict=True
    ):
        best = sorted(range(P), key=lambda j: (-row[j].item(), j))[:count]
        assert segment.tolist() == sorted(best) + list(range(P, P + window))


def test_ragged_positions_of_equal_counts_of_zero_are_the_window():
    order = rank_tokens(random_scores(1, 2, 5)).order
    indices, lengths = ragged_positions(order, torch.zeros(1, 2, dtype=torch.int64), 3)
    assert indices.tolist() == [5, 6, 7, 5, 6, 7] and lengths.tolist() == [3, 3]


def test_a_size_that_is_more_than_enough_leaves_zeros_behind():
    """The host can name a bound without waiting for the counts; segments stay where they are."""
    order, counts = rank_tokens(random_scores(2, 3, 20, seed=4)).order, torch.tensor([[3, 0, 20], [1, 7, 2]])
    exact, lengths = ragged_positions(order, counts, 4)
    padded, same = ragged_positions(order, counts, 4, size=70)
    assert exact.numel() == 33 + 6 * 4 and torch.equal(lengths, same)
    assert torch.equal(padded[:57], exact) and padded[57:].tolist() == [0] * 13


def test_window_means_equal_dense_attention():
    B, Hq, Hk, S, D, window = 1, 6, 2, 29, 8, 5
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, Hq, S, D, generator=g), torch.randn(B, Hk, S, D, generator=g)
    logits = q.double() @ k.double().repeat_interleave(3, dim=1).transpose(2, 3) * D**-0.5
    dense = logits.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    expected = dense[:, :, -window:, : S - window].mean(dim=2)
    got = window_means(q, k, window, scale=D**-0.5)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)  # float32 against float64
