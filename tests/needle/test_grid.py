from __future__ import annotations

import math

import pytest

from kvfactory.needle.grid import depths, lengths, parse_depths


def test_lengths_include_the_end_where_a_step_hits_it():
    assert list(lengths(1000, 3000, 1000)) == [1000, 2000, 3000]
    assert list(lengths(1000, 2999, 1000)) == [1000, 2000]
    assert list(lengths(700, 700, 1)) == [700]
    assert len(lengths(1, 10**15, 1)) == 10**15  # nothing is listed before the window bounds it


def test_default_depths():
    assert depths() == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert depths(3) == [0, 50, 100] and depths(1) == [0] and len(depths(101)) == 101


def test_sigmoid_depths_are_dense_at_the_ends():
    found = depths(11, "sigmoid")
    assert found == [0] + [round(100 / (1 + math.exp(5 - i))) for i in range(1, 10)] + [100]
    assert found == [0, 2, 5, 12, 27, 50, 73, 88, 95, 98, 100]


def test_depths_by_hand():
    assert parse_depths("0,50,100") == [0, 50, 100] and parse_depths(" 75, 5") == [75, 5]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: lengths(0, 10, 1), r"--s_len 0"),
        (lambda: lengths(10, 9, 1), r"--e_len 9 must not be below --s_len 10"),
        (lambda: lengths(10, 20, 0), r"--step 0"),
        (lambda: lengths(10, 20, -5), r"--step -5"),
        (lambda: depths(0), r"--depth_intervals 0"),
        (lambda: depths(102), r"--depth_intervals 102 .* repeats"),
        (lambda: depths(10**15), r"--depth_intervals 1000000000000000 .* repeats"),
        (lambda: depths(10**15, "sigmoid"), r"--depth_intervals 1000000000000000 .* repeats"),
        (lambda: depths(60, "sigmoid"), r"--depth_kind sigmoid repeats"),
        (lambda: depths(5, "cubic"), r"--depth_kind 'cubic' .* linear or sigmoid"),
        (lambda: parse_depths("0,101"), r"--depths '0,101': 101 is outside 0 to 100"),
        (lambda: parse_depths("-1"), r"--depths '-1': -1 is outside"),
        (lambda: parse_depths("0,,5"), r"--depths '0,,5': '' is no whole number"),
        (lambda: parse_depths("12.5"), r"--depths '12.5'"),
        (lambda: parse_depths("5,5"), r"5 occurs twice"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
