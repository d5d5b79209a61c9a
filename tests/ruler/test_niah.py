from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from kvfactory.ruler.niah import DEPTHS, NOISE, VARIANTS, NiahMaker, maker
from kvfactory.ruler.texts import Essay, Sources, essay_text
from kvfactory.ruler.words import ADJECTIVES, NOUNS

FACT = re.compile(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
FORMS = {"words": "[a-z]+-[a-z]+", "numbers": "[1-9][0-9]{6}", "uuids": UUID}


@pytest.fixture(scope="module")
def makers():
    return {name: maker(name, Sources()) for name in VARIANTS}


def parts(sample):
    """(head, context, question) of a prompt."""
    head, rest = sample.input.split("\n\n", 1)
    return head, *rest.rsplit("\n\n", 1)


def solve(sample) -> list[str]:
    """What a reader of the prompt answers, without knowing what made it."""
    _, context, question = parts(sample)
    asked = re.search(r" for (.*)\?$", question)[1].replace("and ", "").split(", ")
    facts = [(key, value) for _, key, value in FACT.findall(context)]
    return [value for key in asked for found, value in facts if found == key]


# Facts of the published configuration: haystack, keys, values, numbers of keys, values per key, queries.
PUBLISHED = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


def test_published_parameters():
    assert {name: tuple(vars(variant).values()) for name, variant in VARIANTS.items()} == PUBLISHED
    assert len(DEPTHS) == 40 and (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    assert all(b - a == pytest.approx(100 / 39) for a, b in zip(DEPTHS, DEPTHS[1:], strict=False))


@pytest.mark.parametrize("name", VARIANTS)
def test_form_of_a_prompt(makers, name):
    haystack, keys, values, key_count, value_count, queries = PUBLISHED[name]
    needles, asked, units = key_count * value_count, queries * value_count, 60
    for index in range(20):
        sample = makers[name].make(f"{name}/{index}", units)
        _, context, question = parts(sample)
        facts = FACT.findall(context)
        assert len(facts) == needles + (units if haystack == "needle" else 0)
        assert {kind for kind, _, _ in facts} == {values}
        assert all(re.fullmatch(FORMS[keys], key) and re.fullmatch(FORMS[values], value) for _, key, value in facts)
        assert len(sample.outputs) == len(set(sample.outputs)) == len(sample.depths) == asked
        assert sorted(solve(sample)) == sorted(sample.outputs)
        for output in sample.outputs:  # once in the whole prompt, and not in what begins the answer
            assert sample.input.count(output) == context.count(output) == 1
            assert output not in sample.answer_prefix
        asked_for = re.search(r" for (.*)\?$", question)[1]
        assert sample.answer_prefix.startswith(" ") and f" for {asked_for} " in sample.answer_prefix
        assert len(asked_for.split(", ")) == queries and ("and " in asked_for) == (queries > 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_singular_where_one_value_is_asked_for(makers, name):
    sample = makers[name].make("k", 40)
    head, _, question = parts(sample)
    kind = "uuid" if name in ("niah_single_3", "niah_multikey_3") else "number"
    several = name in ("niah_multivalue", "niah_multiquery")
    words = f"{kind}s" if several else kind
    for text in (head, question, sample.answer_prefix):
        assert re.search(rf"special magic {words}\b", text), text
    assert sample.answer_prefix.endswith(" are" if several else " is")


@pytest.mark.parametrize("name", VARIANTS)
def test_units_change_the_length_alone(makers, name):
    for index in range(10):
        shorter, longer = (makers[name].make(str(index), units) for units in (41, 173))
        assert shorter.outputs == longer.outputs and shorter.depths == longer.depths
        assert shorter.answer_prefix == longer.answer_prefix
        assert len(shorter.input) < len(longer.input)
        assert makers[name].make(str(index), 41) == shorter
        small = makers[name].make(str(index), makers[name].smallest)
        assert sorted(solve(small)) == sorted(small.outputs)
    assert makers[name].make("a", 41) != makers[name].make("b", 41)


@pytest.mark.parametrize("name", VARIANTS)
def test_needles_stand_at_their_depths(makers, name):
    """Between two units of the haystack, at the whole number of units that the depth comes to."""
    separator = " " if PUBLISHED[name][0] == "essay" else "\n"
    for index in range(10):
        sample = makers[name].make(f"d{index}", 800)
        _, context, _ = parts(sample)
        if PUBLISHED[name][0] == "essay":
            haystack = Essay(essay_text(Sources()).sentences).words(800)
        else:
            needles = {fact[0] for fact in re.finditer(FACT, context) if fact[3] in sample.outputs}
            haystack = [line for line in context.split("\n") if line not in needles]
            assert len(haystack) == 800
        for output, depth in zip(sample.outputs, sample.depths, strict=True):
            before = context.split(f" is: {output}.")[0].rsplit("One of the special", 1)[0]
            before = FACT.sub("", before) if PUBLISHED[name][0] == "essay" else before
            plain = separator.join(haystack[: int(len(haystack) * depth / 100)])
            assert before.split() == plain.split()


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_2", "niah_multikey_1", "niah_multiquery"])
def test_depths_are_flat(name):
    """Chi-square of 39 degrees of freedom: 75 is exceeded by chance in 1 of 2000 histograms (the draw is fixed)."""
    essay = Essay(("one two three.",)) if VARIANTS[name].haystack == "essay" else None
    made = NiahMaker(VARIANTS[name], essay)
    per_output = [Counter() for _ in range(VARIANTS[name].query_count)]
    samples = 2000
    for index in range(samples):
        sample = made.make(f"42/{name}/4096/{index}", 1)
        assert len(set(sample.depths)) == len(sample.depths)  # without replacement
        for histogram, depth in zip(per_output, sample.depths, strict=True):
            histogram[depth] += 1
    for histogram in per_output:
        assert set(histogram) <= set(DEPTHS)
        expected = samples / len(DEPTHS)
        assert sum((histogram[depth] - expected) ** 2 / expected for depth in DEPTHS) < 75


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_distractors_never_answer(monkeypatch, name):
    """With a handful of keys and values to draw from, collisions are certain unless they are avoided."""
    monkeypatch.setattr(random.Random, "randint", lambda self, low, high: low + int(self.random() * 8))
    monkeypatch.setattr("kvfactory.ruler.niah.uuid.UUID", lambda int, version: f"uuid-{int % 8}")
    monkeypatch.setattr("kvfactory.ruler.niah.word_key", lambda draw: f"red-{'abcdefgh'[int(draw.random() * 8)]}")
    for index in range(30):
        sample = maker(name, Sources()).make(str(index), 50)
        assert solve(sample) == sample.outputs
        assert sample.input.count(f"{sample.outputs[0]}.") == 1


def test_haystacks(makers, tmp_path):
    _, context, _ = parts(makers["niah_single_1"].make("k", 7))
    assert context.split("\n").count(NOISE) == 7 and len(context.split("\n")) == 8
    _, context, _ = parts(makers["niah_multikey_2"].make("k", 7))
    _, longer, _ = parts(makers["niah_multikey_2"].make("k", 9))
    assert set(context.split("\n")) < set(longer.split("\n"))
    (tmp_path / "a.txt").write_text("Alpha beta gamma. Delta epsilon.")
    _, context, _ = parts(maker("niah_single_2", Sources(essays=tmp_path)).make("k", 8))
    assert " ".join(FACT.sub("", context).split()) == "Alpha beta gamma. Delta epsilon. Alpha beta gamma."
    with pytest.raises(ValueError, match="--essays_dir .*nothing does not exist"):
        maker("niah_single_2", Sources(essays=tmp_path / "nothing"))


def test_essay_is_cut_at_words():
    essay = Essay(("a b c.", "d e.", "f."))
    words = "a b c. d e. f.".split() * 4
    for count in range(1, 20):
        pieces = essay.words(count)
        assert " ".join(pieces).split() == words[:count] and all(pieces)
        assert all(piece in ("a b c.", "d e.", "f.") for piece in pieces[:-1])


def test_word_lists():
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) > 200
        assert all(re.fullmatch("[a-z]+", word) for word in words)
