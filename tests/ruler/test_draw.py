"""Permutations drawn one at a time: complete, uniform, and the same beginning whatever is taken."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from kvfactory.ruler.draw import permutation


@pytest.mark.parametrize("size", [0, 1, 2, 7, 101])
def test_every_number_comes_once(size):
    assert sorted(permutation(random.Random(1), size)) == list(range(size))


def test_all_orders_are_equally_likely():
    rng = random.Random(0)
    orders = Counter(tuple(permutation(rng, 3)) for _ in range(6000))
    assert len(orders) == 6
    # 1000 expected, standard deviation 29: five of them
    assert all(abs(n - 1000) < 145 for n in orders.values())


def test_taking_more_extends_what_was_taken():
    few, many = (list(islice(permutation(random.Random(3), 1000), n)) for n in (5, 900))
    assert many[:5] == few
