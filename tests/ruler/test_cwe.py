"""Common words extraction: exact counts, words that cannot be mistaken for each other, the same text everywhere."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import pytest

from kvfactory.ruler import cwe


def words_of(text: str) -> list[str]:
    """The words of the numbered list in a text, whose numbers must run from 1."""
    entries = re.findall(r"(\d+)\. (\w+)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


def parts(sample):
    """(words of the example's list, its answer, words of the list asked about)"""
    example, text = sample.input.split("\n\n")
    listed, answer = example.split(sample.answer_prefix)
    return words_of(listed), words_of(answer), words_of(text)


@pytest.mark.parametrize(
    "length, common, other, example_common, example_other, example_others",
    [(4095, 6, 1, 3, 1, 10), (4096, 30, 3, 10, 3, 30), (131072, 30, 3, 10, 3, 30)],
)
@pytest.mark.parametrize("units", [1, 37])
def test_counts_are_exact(length, common, other, example_common, example_other, example_others, units):
    sample = cwe.maker(length).make("a", units)
    example, answer, text = parts(sample)
    counts = Counter(text)
    assert len(set(sample.outputs)) == 10
    assert {counts.pop(word) for word in sample.outputs} == {common}
    assert len(counts) == units and set(counts.values()) == {other}
    counts = Counter(example)
    assert {counts.pop(word) for word in answer} == {example_common} and len(answer) == 10
    assert len(counts) == example_others and set(counts.values()) == {example_other}
    assert not set(example) & set(text)


def test_no_word_is_inside_another():
    assert len(cwe.POOL) >= 40_000 and len(set(cwe.POOL)) == len(cwe.POOL)
    # distinct words of one length: none can be a proper part of another
    assert {len(word) for word in cwe.POOL} == {8}
    assert all(word.isascii() and word.isalpha() and word.islower() for word in cwe.POOL)


def test_references_of_other_samples_do_not_score():
    outputs = [cwe.maker(4096).make(str(i), 5).outputs for i in range(40)]
    hits = [word in " ".join(outputs[i - 1]) for i in range(40) for word in outputs[i]]
    assert sum(hits) / len(hits) < 0.05


def test_the_answer_can_stand_anywhere():
    # a common word is no more often in the first half of the list than other words are
    early = late = 0
    for i in range(20):
        sample = cwe.maker(4096).make(str(i), 100)
        _, _, text = parts(sample)
        half = len(text) // 2
        early += sum(word in sample.outputs for word in text[:half])
        late += sum(word in sample.outputs for word in text[half:])
    # 6000 entries without replacement, half of them expected early; standard deviation below 39, five of them
    assert early + late == 6000 and abs(early - late) < 2 * 195


def test_more_units_extend_the_words_and_keep_the_answer():
    maker = cwe.maker(4096)
    samples = [maker.make("k", units) for units in (1, 2, 10, 999, 6000)]
    lengths = [len(sample.input) for sample in samples]
    assert lengths == sorted(set(lengths))
    assert all(sample.outputs == samples[0].outputs for sample in samples)
    used = [set(parts(sample)[2]) for sample in samples]
    assert all(small < large for small, large in zip(used, used[1:], strict=False))
    assert len({sample.input.split("\n\n")[0] for sample in samples}) == 1


def test_a_sample_is_the_same_on_every_machine():
    sample = cwe.maker(1024).make("key", 3)
    assert sample == cwe.maker(1024).make("key", 3)
    assert sample.input != cwe.maker(1024).make("other key", 3).input
    assert hashlib.sha256(repr(sample).encode()).hexdigest()[:16] == "39f49fb3f354d531"


def test_input_ends_with_the_question_and_the_prefix_goes_on():
    sample = cwe.maker(1024).make("key", 3)
    assert sample.input.endswith("Question: Which 10 words come up most often in this list?")
    assert sample.answer_prefix.startswith(" Answer:") and sample.depths == ()


def test_sizes_that_cannot_be_made_are_refused():
    maker = cwe.maker(1024)
    spare = len(cwe.POOL) - 30
    for units in (0, spare + 1):
        with pytest.raises(ValueError, match=rf"{units} words.*between 1 and {spare}"):
            maker.make("a", units)
    assert len(set(parts(maker.make("a", spare))[2])) == spare + 10
