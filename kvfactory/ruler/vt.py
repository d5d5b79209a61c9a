"""Variable tracking: a value is handed from variable to variable, and all names that hold it are asked for.

Structure and parameters: NVIDIA/RULER @c3f5e3b4, scripts/synthetic.yaml and scripts/data/synthetic/variable_tracking.py
(one chain of four hops among noise, one solved example in front).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from kvfactory.ruler.niah import NOISE
from kvfactory.ruler.sample import Sample

HOPS = 4
EXAMPLE_LINES = 3  # of noise in the solved example, which upstream brings to 500 tokens
PREFIX_SPELLING = "assigned"  # NLCE and lm-evaluation-harness keep the former "assgined", which is another prompt
_QUESTION = (
    "The lines below hide a chain of variable assignments. Follow it from start to end.\n\n{context}\n\n"
    "Question: Which variables of the lines above hold the value {value}? Name all of them."
)
_PREFIX = " Answer: By the assignments above, {count} variables are assigned the value {value}. They are"


class VtMaker:
    """The maker (`kvfactory.ruler.sample.TaskMaker`) of vt; a unit is a line of noise."""

    smallest = 1

    def make(self, key: str, units: int) -> Sample:
        draw = random.Random(key)
        taken: set[str] = set()  # so that no name or value of the example comes back in the problem
        example, example_prefix, example_names = _problem(draw, EXAMPLE_LINES, taken)
        question, prefix, names = _problem(draw, units, taken)
        solved = f"{example}{example_prefix} {' '.join(example_names)}"
        return Sample(f"{solved}\n\n{question}", prefix, names)


def _problem(draw: random.Random, lines: int, taken: set[str]) -> tuple[str, str, list[str]]:
    """(question with its text, answer prefix, names in the order of the chain).

    Names and value do not depend on `lines`, and neither do the places of the chain relative to the length.
    """
    names = [_new(lambda: "".join(draw.choices(string.ascii_uppercase, k=5)), taken) for _ in range(HOPS + 1)]
    value = _new(lambda: str(draw.randint(10_000, 99_999)), taken)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old}" for old, new in zip(names, names[1:], strict=False)]
    text = [NOISE] * lines
    places = sorted(int(draw.random() * (lines + 1)) for _ in chain)
    for place, statement in reversed(list(zip(places, chain, strict=True))):
        text.insert(place, statement)
    words = {"value": value, "count": len(names)}
    return _QUESTION.format(context="\n".join(text), **words), _PREFIX.format(**words), names


def _new(drawn: Callable[[], str], taken: set[str]) -> str:
    """The first draw that is not in `taken`, which it joins."""
    while (text := drawn()) in taken:
        pass
    taken.add(text)
    return text


def maker() -> VtMaker:
    """The maker of vt."""
    return VtMaker()
