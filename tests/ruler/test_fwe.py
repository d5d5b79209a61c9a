"""Frequent words extraction: counts of the zeta distribution, an answer that is always unique."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import pytest

from kvfactory.ruler import fwe


def counts_of(sample) -> Counter:
    return Counter(sample.input.split("\n")[1].split())


@pytest.mark.parametrize("units", [53, 500, 70001])
def test_counts_are_those_of_the_zeta_distribution(units):
    sample = fwe.maker(131072).make("a", units)
    counts = counts_of(sample)
    zeta = math.pi**2 / 6
    expected = [math.floor(units / zeta / rank**2) for rank in range(1, 131072 // 50 + 1)]
    assert sorted(counts.values(), reverse=True) == [n for n in expected if n]
    assert counts["..."] == expected[0]
    assert [counts[word] for word in sample.outputs] == expected[1:4]
    words = set(counts) - {"..."}
    assert all(len(word) == 6 and word.isascii() and word.islower() for word in words)


def test_the_answer_is_unique_at_every_size():
    maker = fwe.maker(4096)
    for units in [*range(maker.smallest, 400), 6001]:
        sample = maker.make(f"{units}", units)
        counts = counts_of(sample)
        top = counts.most_common(5)
        assert [word for word, _ in top[1:4]] == sample.outputs
        assert len({n for _, n in top}) == 5


def test_smallest_is_the_least_from_which_the_answer_is_unique():
    counts = [fwe.count(fwe.FrequentWords.smallest - 1, rank) for rank in range(2, 6)]
    assert len(set(counts)) < 4
    with pytest.raises(ValueError, match="52 words are too few; below 53"):
        fwe.maker(4096).make("a", fwe.FrequentWords.smallest - 1)


@pytest.mark.parametrize("length, vocabulary", [(250, 5), (1024, 20), (4099, 81)])
def test_vocabulary_is_a_fiftieth_of_the_length(length, vocabulary):
    # at this size no share of these ranks is cut to zero
    assert len(counts_of(fwe.maker(length).make("a", 20_000))) == vocabulary


def test_a_length_without_enough_words_is_refused():
    with pytest.raises(ValueError, match="--lengths 249 is too short for fwe.*at least 250"):
        fwe.maker(249)


def test_more_units_only_add_words():
    maker = fwe.maker(4096)
    before = counts_of(maker.make("k", 53))
    for units in (54, 60, 200, 201, 4000):
        sample = maker.make("k", units)
        counts = counts_of(sample)
        assert before <= counts and sample.outputs == maker.make("k", 53).outputs
        before = counts
    assert before.total() > 3500


def test_words_are_mixed():
    early = late = 0
    for i in range(20):
        words = fwe.maker(4096).make(str(i), 500).input.split("\n")[1].split()
        half = len(words) // 2
        early += words[:half].count("...")
        late += words[half:].count("...")
    # 20 x 303 dots in 20 x about 475 words: the standard deviation of `early` is below 39, five of them
    assert early + late == 20 * fwe.count(500, 1) and abs(early - late) < 2 * 195


def test_code_words_do_not_repeat_between_samples():
    outputs = [fwe.maker(4096).make(str(i), 60).outputs for i in range(100)]
    hits = [word in " ".join(outputs[i - 1]) for i in range(100) for word in outputs[i]]
    assert sum(hits) / len(hits) < 0.05


def test_numbers_and_code_words_are_one_to_one():
    assert fwe._code_word(0) == "aaaaaa" and fwe._code_word(26**6 - 1) == "zzzzzz"
    assert fwe._code_word(1 + 26 * 2) == "bcaaaa"


def test_a_sample_is_the_same_on_every_machine():
    sample = fwe.maker(1024).make("key", 60)
    assert sample == fwe.maker(1024).make("key", 60)
    assert hashlib.sha256(repr(sample).encode()).hexdigest()[:16] == "664e6360570453b2"
