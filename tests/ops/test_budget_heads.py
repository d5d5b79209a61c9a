from __future__ import annotations

import numpy as np
import pytest

from kvfactory.ops.budget import head_demand, per_kv_head, water_fill


def test_demand_is_a_minimum_plus_a_share_of_the_pool():
    # 100 // 1.5 = 66 go into the pool of 4 heads, 34 stay every head's minimum.
    shares = np.array([[0.5, 0.25], [0.25, 0.0]])
    assert head_demand(shares, 100, 1.5).tolist() == [[166.0, 100.0], [100.0, 34.0]]
    assert head_demand(shares, 100, 1.5).sum() == 4 * 100


def test_demand_divides_in_floating_point_as_published():
    # 44 // 1.1 is 39 in floating point and would be 40 exactly; 39 leaves a minimum of 5.
    assert head_demand(np.array([[0.0, 1.0]]), 44, 1.1).tolist() == [[5.0, 83.0]]


def test_a_larger_beta_means_a_smaller_pool():
    shares = np.array([[0.9, 0.1]])
    assert np.ptp(head_demand(shares, 100, 5)) < np.ptp(head_demand(shares, 100, 1.01))


def test_kv_heads_take_the_mean_of_their_group():
    table = np.array([[8, 4, 6, 2, 12, 2, 4, 6], [3, 4, 4, 4, 2, 2, 2, 3]])
    assert np.rint(per_kv_head(table, 2)).tolist() == [[5, 6], [4, 2]]
    assert per_kv_head(table, 8).tolist() == table.tolist()


def fill_by_hand(demand, weights, limit):
    """Pour a thousandth of a token at a time into open heads, in proportion to their weights."""
    level = np.minimum(demand, limit).astype(float)
    spill = demand.sum() - level.sum()
    step = spill / 20000
    for _ in range(20000):
        room = level < limit - 1e-9
        if not room.any():
            break
        share = np.where(room, weights, 0.0)
        share = share / share.sum() if share.sum() > 0 else room / room.sum()
        level = np.minimum(level + step * share, limit)
    return level


@pytest.mark.parametrize("limit", [9, 20, 45, 400])
def test_what_heads_ask_for_beyond_the_limit_goes_to_the_others(limit):
    rng = np.random.default_rng(limit)
    shares = rng.random((3, 5)) ** 6
    shares /= shares.sum()
    demand = head_demand(shares, 20, 1.2)
    counts = water_fill(demand, shares, limit, 15 * 20)
    assert counts.sum() == min(15 * 20, 15 * limit) and counts.max() <= limit and counts.min() >= 0
    # Pouring in steps overshoots a head's limit by at most a step, hence the slack beside the rounding of 1.
    assert np.abs(counts - fill_by_hand(demand, shares, limit)).max() < 1.1


def test_without_overflow_filling_is_rounding():
    demand = np.array([[3.25, 4.5], [2.25, 2.0]])
    assert water_fill(demand, demand, 50, 12).tolist() == [[3, 5], [2, 2]]


def test_heads_without_weight_share_evenly_once_the_others_are_full():
    demand, weights = np.array([[20.0, 1.0, 1.0, 2.0]]), np.array([[1.0, 0.0, 0.0, 0.0]])
    assert water_fill(demand, weights, 10, 24).tolist() == [[10, 5, 4, 5]]  # 4 1/3, 4 1/3, 5 1/3
