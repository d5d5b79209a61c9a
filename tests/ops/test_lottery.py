from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvfactory.ops.lottery import draw_positions


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_pairs_are_drawn_as_one_after_the_other_without_replacement():
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    scores = weights.log().expand(1, 20000, 4)  # heads draw independently: 20,000 trials at once
    drawn = draw_positions(scores, 2, 1.0, generator(0))[0]
    p = (weights / 10).tolist()
    for pair in itertools.combinations(range(4), 2):
        i, j = pair
        expected = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        found = (drawn == torch.tensor(pair)).all(dim=-1).float().mean().item()
        # Five standard errors of 20,000 draws; the seed is fixed.
        assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / 20000)


def test_temperature_sharpens_and_infinity_draws_evenly():
    scores = torch.tensor([0.0, 1.0]).expand(1, 20000, 2)
    for temperature, expected in ((1.0, math.e / (1 + math.e)), (0.5, math.e**2 / (1 + math.e**2)), (math.inf, 0.5)):
        found = draw_positions(scores, 1, temperature, generator(1)).float().mean().item()
        assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / 20000)


def test_taken_positions_are_never_drawn():
    scores = torch.randn(1, 300, 9, generator=generator(0))
    taken = scores.topk(3, dim=-1).indices
    drawn = draw_positions(scores, 6, 1.0, generator(1), taken=taken)
    together = torch.cat([taken, drawn], dim=-1).sort(dim=-1).values
    assert torch.equal(together, torch.arange(9).expand(1, 300, 9))


def test_rows_of_a_batch_draw_as_they_would_alone():
    scores = torch.randn(3, 4, 30, generator=generator(0))
    drawn = draw_positions(scores, 7, 1.0, generator(5))
    for row in range(3):
        assert torch.equal(drawn[row], draw_positions(scores[row : row + 1], 7, 1.0, generator(5))[0])


def test_a_sampler_sees_probabilities_and_its_largest_results_are_drawn():
    scores = torch.tensor([[[1.0, 3.0, 2.0, 0.0]]])
    seen = []

    def sampler(p):
        seen.append(p)
        return torch.ones_like(p)

    drawn = draw_positions(scores, 2, 1.0, generator(0), taken=torch.tensor([[[1]]]), sampler=sampler)
    assert drawn.tolist() == [[[0, 2]]]  # equal results: the lower positions, never the taken one
    weights = [math.exp(1), 0.0, math.exp(2), 1.0]
    assert seen[0][0, 0].tolist() == pytest.approx([w / sum(weights) for w in weights])
