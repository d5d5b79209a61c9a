"""Frequent words extraction: made-up words whose counts follow a zeta distribution; the three most frequent are asked.

Parameters: NVIDIA/RULER @c3f5e3b4, scripts/data/synthetic/freq_words_extraction.py and synthetic.yaml; alpha 2.0 as in
the paper (arXiv 2404.06654). Wording is ours.
"""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from itertools import pairwise

from kvfactory.ruler.sample import Sample

NOISE = "..."  # stands for rank 1, which makes up most of the text
LETTERS = 6
ASKED = range(2, 5)  # the ranks that are the answer
_ZETA_2 = math.pi**2 / 6

_TASK = """\
Below is a text in a made-up code. Count how often each code word appears in it and find the three most frequent ones.
{words}
Question: Which three code words appear most often in the text above? The dots do not count as a word. \
Name the words only, without an explanation."""
_PREFIX = " Answer: The three code words that appear most often in the text above are:"


def count(units: int, rank: int) -> int:
    """How often the word of a rank (from 1) stands in a text of `units` words: its share 1 / (zeta(2) rank^2), cut."""
    return int(units / (_ZETA_2 * rank**2))


def _distinct(units: int) -> bool:
    """Whether each asked word is strictly more frequent than the next one, and the last than what is not asked."""
    return all(count(units, rank) > count(units, rank + 1) for rank in ASKED)


def _smallest() -> int:
    """The least number of units from which on the answer is always unique."""
    # where two shares differ by a whole word, so do the cut counts: only sizes below that need a look
    always = math.ceil(max(_ZETA_2 / (1 / a**2 - 1 / b**2) for a, b in pairwise([*ASKED, ASKED.stop])))
    return 1 + max(units for units in range(always) if not _distinct(units))


def _code_word(number: int) -> str:
    """The word of a number below 26^6, read in base 26."""
    return "".join(string.ascii_lowercase[number // 26**i % 26] for i in range(LETTERS))


@dataclass(frozen=True)
class FrequentWords:
    """Maker of fwe samples. One unit is one word of the text, dots included, before counts are cut to integers.

    Attributes:
        vocabulary: number of ranks; a rank whose count is below 1 does not appear.
    """

    vocabulary: int
    smallest: int = _smallest()

    def make(self, key: str, units: int) -> Sample:
        """The sample of `key` for `units` words; the words and their ranks are the key's alone.

        Raises:
            ValueError: units below `smallest`, where the counts of two asked words may be equal.
        """
        if units < self.smallest:
            raise ValueError(
                f"fwe: {units} words are too few; below {self.smallest} the counts of the most frequent may be equal."
            )
        rng = random.Random(key)
        # drawn as numbers without replacement: distinct without a retry; rank 1 is the noise
        words = [NOISE, *map(_code_word, rng.sample(range(26**LETTERS), self.vocabulary - 1))]
        text = [word for rank, word in enumerate(words, 1) for word in [word] * count(units, rank)]
        rng.shuffle(text)
        return Sample(_TASK.format(words=" ".join(text)), _PREFIX, [words[rank - 1] for rank in ASKED])


def maker(length: int) -> FrequentWords:
    """The maker for prompts of `length` tokens: a fiftieth of it is the vocabulary.

    Raises:
        ValueError: a length whose vocabulary has no word besides the dots and the three asked ones.
    """
    least = 50 * ASKED.stop
    if length < least:
        raise ValueError(
            f"--lengths {length} is too short for fwe, whose vocabulary is a fiftieth of it: at least {least}"
        )
    return FrequentWords(length // 50)
