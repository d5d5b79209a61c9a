"""Trials of a probe as token ids: the needle's place is known by construction, never searched for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from kvfactory.probe.haystack import Haystack
from kvfactory.probe.needles import Needle

_OPENING = "Text:"  # in front of everything, so that a needle at depth 0 has the same tokens as anywhere else


@dataclass(frozen=True)
class Trial:
    """One question to a model.

    Attributes:
        name: needle, length and depth.
        prompt: token ids, at least two.
        span: [start, end) of the sentence that answers, positions in `prompt`.
        answer: token ids of the right output.
        reference: its text, which the gate compares with the output.
    """

    name: str
    prompt: tuple[int, ...]
    span: tuple[int, int]
    answer: tuple[int, ...]
    reference: str = ""


def spread(start: float, end: float, count: int) -> list[int]:
    """`count` whole numbers spread evenly from `start` to `end`, both included."""
    return [int(x) for x in np.round(np.linspace(start, end, count))]


class TrialMaker:
    """Puts needles into a haystack, for one tokenizer."""

    def __init__(self, tokenizer: Any, haystack: Haystack):
        self._tokenizer = tokenizer
        self._joiner = self._word_joiner()
        self._sentences = self._encoded(haystack)
        self._known: list[list[int]] = []
        self._first = self._special_prefix()

    def ids(self, text: str) -> list[int]:
        """Token ids of a piece of text, no special tokens added."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _word_joiner(self) -> str:
        """What a piece must begin with to follow another: nothing where the tokenizer puts a blank there by itself."""
        for joiner in (" ", ""):
            if self._tokenizer.decode(self.ids("a stone.") + self.ids(joiner + "The lamp")) == "a stone. The lamp":
                return joiner
        return " "

    def _special_prefix(self) -> list[int]:
        """What the tokenizer puts in front of a prompt (its BOS token, or nothing)."""
        bare = self.ids("stone")
        whole = list(self._tokenizer("stone").input_ids)
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    def _encoded(self, haystack: Haystack) -> Iterator[list[int]]:
        for sentence in haystack:
            if ids := self.ids(self._joiner + sentence):
                yield ids

    def _cut(self, length: int) -> list[list[int]]:
        """The first whole sentences of the haystack that fit into `length` tokens."""
        while sum(map(len, self._known)) <= length:
            self._known.append(next(self._sentences))
        ends = list(accumulate(map(len, self._known)))
        return self._known[: sum(end <= length for end in ends)]

    def make(self, needle: Needle, length: int, depth: float) -> Trial:
        """A text of at most `length` tokens (or the needle alone) with the needle at `depth` percent.

        The needle goes to the last end of a sentence at or before that place.
        """
        inserted = [self.ids(self._joiner + sentence) for sentence in needle.sentences]
        text = self._cut(max(0, length - sum(map(len, inserted))))
        ends = [0, *accumulate(map(len, text))]
        before = max(i for i, end in enumerate(ends) if end <= ends[-1] * depth / 100)
        pieces = [self._first, self.ids(_OPENING), *text[:before], *inserted, *text[before:]]
        at = 2 + before + needle.target
        start = sum(map(len, pieces[:at]))
        pieces.append(self.ids(f"\n\nQ: {needle.question}\nA: {needle.cue}"))
        return Trial(
            name=f"{needle.name}|{length}|{depth:g}",
            prompt=tuple(token for piece in pieces for token in piece),
            span=(start, start + len(pieces[at])),
            answer=tuple(self.ids(self._joiner + needle.answer)),
            reference=needle.answer,
        )


def make_trials(
    maker: TrialMaker, asked: Sequence[Needle], lengths: Iterable[int], depths: Iterable[float]
) -> list[Trial]:
    """All combinations, needle by needle within a length and a depth, so that a stopped probe has seen all needles."""
    depths = list(depths)
    return [maker.make(needle, length, depth) for length in lengths for depth in depths for needle in asked]


def trials_sha256(trials: Sequence[Trial]) -> str:
    """Identity of a set of trials."""
    digest = hashlib.sha256()
    for trial in trials:
        digest.update(json.dumps([trial.name, trial.prompt, trial.span, trial.answer, trial.reference]).encode())
    return digest.hexdigest()
