"""Needle in a haystack, eight variants: facts about keys are hidden in a text, the values of some keys are asked for.

Parameters and the form of the fact: NVIDIA/RULER @c3f5e3b4, scripts/synthetic.yaml and scripts/data/synthetic/niah.py.
Two things differ from there. Needles stand at the grid of depths in every kind of haystack (upstream at any line of
repeated and needle haystacks), and no distractor repeats the key or the value of a needle.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

from kvfactory.ruler.sample import Sample
from kvfactory.ruler.texts import Essay, Sources, essay_text
from kvfactory.ruler.words import word_key

DEPTHS = tuple(100 * i / 39 for i in range(40))  # numpy.linspace(0, 100, 40), in percent
LEAST_ESSAY_WORDS = 25
NOISE = "The kettle is warm. The lamp is lit. The door is closed. We wait a while. Then we walk home."
_NEEDLE = "One of the special magic {type} for {key} is: {value}."


@dataclass(frozen=True)
class Variant:
    """One row of the table of tasks.

    Attributes:
        haystack: "repeat" (one line again and again), "essay" (a unit is a word) or "needle" (a unit is a distractor).
        keys: "words" or "uuids".
        values: "numbers" (7 digits) or "uuids".
        key_count: keys with needles.
        value_count: needles per key.
        query_count: keys asked for.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    key_count: int = 1
    value_count: int = 1
    query_count: int = 1


VARIANTS = {
    "niah_single_1": Variant("repeat"),
    "niah_single_2": Variant("essay"),
    "niah_single_3": Variant("essay", values="uuids"),
    "niah_multikey_1": Variant("essay", key_count=4),
    "niah_multikey_2": Variant("needle"),
    "niah_multikey_3": Variant("needle", keys="uuids", values="uuids"),
    "niah_multivalue": Variant("essay", value_count=4),
    "niah_multiquery": Variant("essay", key_count=4, query_count=4),
}

_SEVERAL = (
    "Read the text below and remember the special magic {type}s that it mentions: some of them will be asked for at "
    "the end.\n\n{context}\n\nWhich special magic {type}s does the text above mention for {query}?",
    " The special magic {type}s that the text mentions for {query} are",
)
_ONE = (
    "Read the text below and remember the special magic {type} that it mentions: it will be asked for at the end."
    "\n\n{context}\n\nWhich special magic {type} does the text above mention for {query}?",
    " The special magic {type} that the text mentions for {query} is",
)


def _listed(names: list[str]) -> str:
    """a / a, and b / a, b, and c: the way upstream joins the keys of a question."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _draw(draw: random.Random, kind: str, taken: set[str]) -> str:
    """A key or a value of a kind that is not among `taken`."""
    while True:
        if kind == "words":
            drawn = word_key(draw)
        elif kind == "numbers":
            drawn = str(draw.randint(1_000_000, 9_999_999))
        else:
            drawn = str(uuid.UUID(int=draw.getrandbits(128), version=4))
        if drawn not in taken:
            return drawn


def _draw_new(draw: random.Random, kind: str, count: int, taken: set[str]) -> list[str]:
    """`count` draws, all different; they are added to `taken`."""
    drawn = []
    for _ in range(count):
        drawn.append(_draw(draw, kind, taken))
        taken.add(drawn[-1])
    return drawn


class NiahMaker:
    """The maker (`kvfactory.ruler.sample.TaskMaker`) of one variant.

    Args:
        essay: where the haystack is an essay.
    """

    def __init__(self, variant: Variant, essay: Essay | None = None):
        self.variant = variant
        self.smallest = LEAST_ESSAY_WORDS if variant.haystack == "essay" else 1
        self._essay = essay

    def make(self, key: str, units: int) -> Sample:
        """`depths` belong to `outputs`, one each: the share of sentences or lines before the needle, as upstream."""
        variant, draw = self.variant, random.Random(f"{key}/needles")
        taken: set[str] = set()
        keys = _draw_new(draw, variant.keys, variant.key_count, taken)
        values = _draw_new(draw, variant.values, variant.key_count * variant.value_count, taken)
        depths = draw.sample(DEPTHS, len(values))  # in random order, so that needles are mixed too
        queried = draw.sample(range(variant.key_count), variant.query_count)

        # "numbers" or "uuids": a fact has the plural even where a single one is asked for
        facts = [
            _NEEDLE.format(type=variant.values, key=key_, value=value)
            for key_, value in zip([k for k in keys for _ in range(variant.value_count)], values, strict=True)
        ]
        context = self._hide(facts, depths, self._haystack(key, units, taken))
        asked = [i * variant.value_count + j for i in queried for j in range(variant.value_count)]
        question, prefix = _ONE if len(asked) == 1 else _SEVERAL
        words = {"type": variant.values.removesuffix("s"), "query": _listed([keys[i] for i in queried])}
        return Sample(
            input=question.format(context=context, **words),
            answer_prefix=prefix.format(**words),
            outputs=[values[i] for i in asked],
            depths=tuple(depths[i] for i in asked),
        )

    def _haystack(self, key: str, units: int, taken: set[str]) -> list[str]:
        variant = self.variant
        if self._essay is not None:
            return self._essay.words(units)
        if variant.haystack == "repeat":
            return [NOISE] * units
        draw = random.Random(f"{key}/haystack")
        return [
            _NEEDLE.format(
                type=variant.values, key=_draw(draw, variant.keys, taken), value=_draw(draw, variant.values, taken)
            )
            for _ in range(units)
        ]

    def _hide(self, facts: list[str], depths: list[float], haystack: list[str]) -> str:
        """The haystack with every fact at its depth, between two sentences or lines."""
        pieces, last = [], 0
        for depth, fact in sorted(zip(depths, facts, strict=True)):
            place = int(len(haystack) * depth / 100)
            pieces += [*haystack[last:place], fact]
            last = place
        return (" " if self._essay is not None else "\n").join([*pieces, *haystack[last:]])


def maker(task: str, sources: Sources) -> NiahMaker:
    """The maker of a niah task.

    Raises:
        ValueError: the essays cannot be read.
    """
    variant = VARIANTS[task]
    return NiahMaker(variant, Essay(essay_text(sources).sentences) if variant.haystack == "essay" else None)
