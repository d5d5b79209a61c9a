from __future__ import annotations

import re

import pytest

from kvfactory.ruler.niah import NOISE
from kvfactory.ruler.vt import EXAMPLE_LINES, maker

STATEMENT = re.compile(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", re.MULTILINE)


def halves(sample):
    """(solved example, problem)."""
    start = sample.input.index("The lines below", 1)
    return sample.input[:start], sample.input[start:]


def solve(text: str) -> list[str]:
    """Names that hold the value asked for, read line by line."""
    value = re.findall(r"hold the value (\d+)\?", text)[-1]
    held: dict[str, str] = {}
    for name, source in STATEMENT.findall(text):
        held[name] = held.get(source, source)
    return [name for name, found in held.items() if found == value]


@pytest.mark.parametrize("units", [1, 2, 17, 200])
def test_one_chain_of_four_hops(units):
    for index in range(25):
        sample = maker().make(f"{units}/{index}", units)
        example, problem = halves(sample)
        assert solve(problem) == sample.outputs and len(set(sample.outputs)) == 5
        assert solve(example) == example.split(" They are ")[1].split()
        assert example.count(NOISE) == EXAMPLE_LINES and problem.count(NOISE) == units
        assert len(STATEMENT.findall(problem)) == len(STATEMENT.findall(example)) == 5
        # every name but the last is set once and read once, and no name or value of the example comes back
        assert [problem.count(name) for name in sample.outputs] == [2, 2, 2, 2, 1]
        assert not any(name in example or name in sample.answer_prefix for name in sample.outputs)
        value = re.search(r"hold the value (\d{5})\?", problem)[1]
        assert value not in example and f"5 variables are assigned the value {value}." in sample.answer_prefix
        assert sample.answer_prefix.startswith(" ") and not sample.answer_prefix.endswith(" ")
        assert example.endswith(f"{' '.join(solve(example))}\n\n") and sample.depths == ()


def test_the_example_is_answered_the_way_the_model_has_to():
    sample = maker().make("k", 9)
    example, problem = halves(sample)
    asked, wanted = (re.findall(r"hold the value (\d+)", text)[-1] for text in (example, problem))
    assert f"Name all of them.{sample.answer_prefix.replace(wanted, asked)} " in example


def test_units_change_the_length_alone():
    for index in range(20):
        samples = [maker().make(str(index), units) for units in (5, 6, 90, 900)]
        assert len({(*s.outputs, s.answer_prefix) for s in samples}) == 1
        assert [len(s.input) for s in samples] == sorted({len(s.input) for s in samples})
        assert maker().make(str(index), 90) == samples[2]


def test_names_and_values_are_never_drawn_twice(monkeypatch):
    """With 32 names and two values to draw from, collisions are certain unless they are avoided."""
    monkeypatch.setattr("kvfactory.ruler.vt.string.ascii_uppercase", "AB")
    monkeypatch.setattr("random.Random.randint", lambda self, low, high: low + int(self.random() * 2))
    for index in range(30):
        sample = maker().make(str(index), 3)
        example, problem = halves(sample)
        assert solve(problem) == sample.outputs
        assert not any(name in example for name in sample.outputs)
        assert len(set(re.findall(r"hold the value (\d+)", sample.input))) == 2


def test_the_chain_is_spread_over_the_whole_text():
    """Mean place of the i-th of five uniform draws in order is i/6; its standard error over 400 samples is 0.009."""
    places = [0.0] * 5
    for index in range(400):
        lines = halves(maker().make(f"s{index}", 200))[1].split("\n")
        found = [i for i, line in enumerate(lines) if line.startswith("VAR")]
        places = [total + place / len(lines) for total, place in zip(places, found, strict=True)]
    assert [total / 400 for total in places] == pytest.approx([i / 6 for i in range(1, 6)], abs=0.04)
