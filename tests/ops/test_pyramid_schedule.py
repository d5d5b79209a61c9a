"""PyramidKV's layer schedule: published values, branches, and sums."""

from __future__ import annotations

import pytest

from kvfactory.ops.budget import pyramid_schedule


def schedule(capacity=128, window=8, n=4000, layers=32, beta=20, **more):
    return pyramid_schedule(capacity, window, n, layers, beta, **more)


@pytest.mark.parametrize("capacity, first, last, step", [(128, 234, 17, 7), (2048, 3978, 103, 125), (64, 110, 17, 3)])
def test_published_schedules(capacity, first, last, step):
    """Past tokens of 32 layers on a long prompt, as the original project's code gives them."""
    past = [n - 8 for n in schedule(capacity, n=100_000)]
    assert past == [first - layer * step for layer in range(32)] and past[-1] == last


@pytest.mark.parametrize(
    "layers, capacity, mean",
    [
        (16, 64, 65.5),
        (28, 96, 99),
        (32, 64, 71.5),
        (32, 128, 133.5),
        (32, 2048, 2048.5),
        (40, 128, 144.5),
        (80, 128, 163),
    ],
)
def test_floor_rounding_exceeds_the_budget_by_the_published_amount(layers, capacity, mean):
    kept = schedule(capacity, layers=layers, n=100_000)
    assert sum(kept) / layers == mean
    base = capacity - 8
    assert mean - 8 == base + ((2 * base - 2 * (base // 20)) % (layers - 1)) / 2


@pytest.mark.parametrize("n, kept", [(127, 127), (128, 128), (129, 128), (239, 128)])
def test_short_and_middle_prompts_are_uniform(n, kept):
    """Up to the budget everything, below twice the past budget the same in every layer."""
    assert schedule(n=n) == [kept] * 32


def test_the_pyramid_starts_at_twice_the_past_budget():
    assert schedule(n=240) == [240 - 7 * layer for layer in range(32)]  # 232 past tokens + window; nothing is clamped
    assert schedule(n=239, mid_branch="pyramid")[0] > 128


@pytest.mark.parametrize("capacity", [17, 33, 64, 130, 513])
@pytest.mark.parametrize("layers", [1, 2, 7, 30, 32])
@pytest.mark.parametrize("beta", [1, 3, 20])
@pytest.mark.parametrize("extra", [1, 9, 150, 5000])
@pytest.mark.parametrize("mid_branch", ["uniform", "pyramid"])
def test_exact_rounding_sums_to_the_nominal_total(capacity, layers, beta, extra, mid_branch):
    n = capacity + extra
    for rounding in ("floor", "exact"):
        kept = schedule(capacity, n=n, layers=layers, beta=beta, rounding=rounding, mid_branch=mid_branch)
        assert kept == sorted(kept, reverse=True) and kept[0] <= n and kept[-1] >= 8
        if rounding == "exact":
            assert sum(kept) == layers * capacity
        elif layers > 1:
            assert sum(kept) >= layers * capacity


def test_one_layer_needs_no_step():
    assert schedule(layers=1, rounding="exact") == [128]
    assert schedule(layers=1) == [234 + 8]
