from __future__ import annotations

import random

import pytest

from kvfactory.ruler.fit import TooLong, fit
from kvfactory.ruler.sample import Sample


class WordMaker:
    """Units of a random number of words, seven words around them."""

    def __init__(self, smallest: int = 1, most: int = 9, limit: int = 10**9):
        self.smallest, self._most, self._limit = smallest, most, limit

    def make(self, key: str, units: int) -> Sample:
        draw = random.Random(key)
        words = [word for _ in range(min(units, self._limit)) for word in ["w"] * draw.randint(1, self._most)]
        return Sample(" ".join(["a b c d e", *words]), " f g", [key])


class Counter:
    """Counts words, and how often it was asked; `wobble` makes the count leave monotony."""

    def __init__(self, wobble: int = 0):
        self.wobble, self.calls, self.seen = wobble, 0, {}

    def __call__(self, text: str, prefix: str) -> int:
        self.calls += 1
        words = len((text + prefix).split())
        self.seen[text] = words + (words * 7919 % (self.wobble + 1))
        return self.seen[text]


@pytest.mark.parametrize("wobble", [0, 5])
@pytest.mark.parametrize("most", [1, 9, 60])
@pytest.mark.parametrize("target", [97, 501, 4097])
def test_fits_and_its_neighbour_does_not(target, most, wobble):
    maker, first = WordMaker(most=most), None
    for key in ("a", "b", "c", "d"):
        count = Counter(wobble)
        found = fit(maker, key, count, target, first)
        assert found.sample == maker.make(key, found.units)
        assert found.tokens == count.seen[found.sample.input] <= target
        assert count.seen[maker.make(key, found.units + 1).input] > target  # it was counted: no claim without a look
        first = first or found


def test_counts_that_jump_are_halved_and_not_crept_up_to():
    def count(text: str, prefix: str) -> int:
        return len(text.split()) if len(text.split()) < 3000 else 10**7

    assert fit(WordMaker(most=1), "a", count, 5000).tokens == 2999


def test_few_counts_with_a_guess():
    maker, count = WordMaker(), Counter()
    first = fit(maker, "0", count, 20_000)
    assert count.calls <= 12
    count.calls = 0
    for index in range(1, 21):
        fit(maker, str(index), count, 20_000, first)
    assert count.calls <= 4 * 20


def test_the_guess_decides_nothing_where_counts_are_monotone():
    maker = WordMaker()
    alone = fit(maker, "k", Counter(), 3001)
    for other, target in (("x", 3001), ("y", 90), ("z", 50_000)):
        found = fit(maker, "k", Counter(), 3001, fit(maker, other, Counter(), target))
        assert (found.sample, found.units, found.tokens) == (alone.sample, alone.units, alone.tokens)


def test_the_smallest_sample_alone_fits():
    maker = WordMaker(smallest=3, most=1)
    found = fit(maker, "k", Counter(), 10)
    assert (found.units, found.tokens) == (3, 10)
    with pytest.raises(TooLong, match="10 prompt tokens, more than 9") as error:
        fit(maker, "k", Counter(), 9)
    assert error.value.tokens == 10
    # from above: a guess that is far too large comes down to the smallest and no further
    high = fit(maker, "k", Counter(), 900)
    assert fit(maker, "k", Counter(), 10, high).units == 3
    with pytest.raises(TooLong):
        fit(maker, "k", Counter(), 9, high)


def test_a_text_that_stops_growing_is_refused():
    count = Counter()
    with pytest.raises(ValueError, match="does not grow to the 500 that it should have"):
        fit(WordMaker(limit=20), "k", count, 500)
    assert count.calls < 20
