"""Common words extraction: ten words stand in a numbered list more often than all others, and are asked for.

Parameters: NVIDIA/RULER @c3f5e3b4, scripts/data/synthetic/common_words_extraction.py and synthetic.yaml. Wording and
words are ours. Every word is a compound of two everyday words of four letters, so all have eight letters and none can
be found inside another: a substring match is a match of the whole word. Since words share halves, scores are not
comparable with those on the official word list.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvfactory.ruler.draw import permutation
from kvfactory.ruler.sample import Sample

COMMON = 10
SHORT = 4096  # lists for fewer tokens than this repeat their words less often

_STEMS = """
arch area back ball band bank base beam bean bell belt bird boat body bolt bone book boot bush call camp card care
cart cash cell chip city clay clip club coal coat code cold comb cone cook cool copy corn crow cube dark data date
deck deep dial dish disk door down drop dust east edge exit face fact fair fall farm fast file fill film find fine
fire firm fish flag flat flow fold folk food foot form fort fuel full gain game gate gear goal gold good grid grow
hair half hall hand hard head heat helm help hero high hill hold hole home hood hook horn host hour icon idea inch
iris iron item join jump keep kick kind king lake land lane lead leaf left lens life lift lime line link lion list
live load loan lock long look loom loop lord loss love mail main make mark mask mass mate math meal meat menu mesh
mile milk mill mind mine mist mode moon move myth nail name neck nest node nose note open oven pack page pair park
part pass past path peak pick pine pipe plan play plot plug plus pole pool port post pull pure push race raft rail
rain rank rare rate read real reed rest rice rich ride ring rise road robe rock role roll room root rose rule rush
rust salt sand save seat seed self shed ship shop show side sign site size skin slow snow sock soft soil song sort
soup spin spot star stay stem step stop tail tank task team term test text tick tile time tone tool town tree trip
true tube tune turn type unit user view vine vote walk wall warm wash wave weed week well west wick wide wild wind
wine wing wire wise wolf wood word work wrap yard year zero zone
""".split()

POOL = tuple(first + second for first in _STEMS for second in _STEMS if first != second)

_TASK = f"""\
Here is a numbered list of words. {COMMON} of them come up far more often than the rest. Find these {COMMON} words.
{{words}}
Question: Which {COMMON} words come up most often in this list?"""
_PREFIX = f" Answer: The {COMMON} words that come up most often in this list are:"


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _task(rng: random.Random, common: Sequence[str], others: Sequence[str], repeats: tuple[int, int]) -> str:
    """Instruction, shuffled list and question; `repeats` is how often each common and each other word stands in it."""
    entries = [*common] * repeats[0] + [*others] * repeats[1]
    rng.shuffle(entries)
    return _TASK.format(words=_numbered(entries))


@dataclass(frozen=True)
class CommonWords:
    """Maker of cwe samples. One unit is one distinct word besides the common ones.

    Attributes:
        repeats: how often each common and each other word stands in the list.
        example_repeats, example_others: the same for the worked example, and its number of other words.
    """

    repeats: tuple[int, int]
    example_repeats: tuple[int, int]
    example_others: int
    smallest: int = 1

    def make(self, key: str, units: int) -> Sample:
        """The sample of `key` with `units` other words; the common words and the example are the key's alone.

        Raises:
            ValueError: units below `smallest`, or more than there are words.
        """
        spare = len(POOL) - 2 * COMMON - self.example_others
        if not self.smallest <= units <= spare:
            raise ValueError(f"cwe: {units} words besides the common ones; between {self.smallest} and {spare} can be.")
        rng = random.Random(key)
        draws = (POOL[i] for i in permutation(random.Random(f"{key} words"), len(POOL)))
        common, example_common = (list(islice(draws, COMMON)) for _ in range(2))
        example_others = list(islice(draws, self.example_others))
        example = _task(rng, example_common, example_others, self.example_repeats)
        text = _task(rng, common, list(islice(draws, units)), self.repeats)
        return Sample(f"{example}{_PREFIX} {_numbered(example_common)}\n\n{text}", _PREFIX, common)


def maker(length: int) -> CommonWords:
    """The maker for prompts of `length` tokens, which decides how often words are repeated."""
    return CommonWords((6, 1), (3, 1), 10) if length < SHORT else CommonWords((30, 3), (10, 3), 30)
