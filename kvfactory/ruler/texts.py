"""Where the texts of the tasks come from: folders and files of the user's, or our own."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvfactory.probe.haystack import Haystack, generated_haystack, read_haystack

ESSAY_SEED = 42  # of the order of files and of the generated text: the essay is the same for all seeds of samples
ESSAY_SENTENCES = 10_000  # of generated text, about 180,000 words


@dataclass(frozen=True)
class Sources:
    """Texts given by path; None takes our own.

    Attributes:
        essays: folder of .txt files or one text file.
        squad: SQuAD v2 file (JSON) for qa_1.
        hotpot: HotpotQA distractor file (JSON) for qa_2.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpot: Path | None = None


def essay_text(sources: Sources) -> Haystack:
    """The sentences of `sources.essays`, or our own.

    Raises:
        ValueError: nothing there, no text, or a file that is not UTF-8.
    """
    if sources.essays is None:
        return generated_haystack(ESSAY_SEED, ESSAY_SENTENCES)
    return read_haystack(sources.essays, ESSAY_SEED, "--essays_dir")


class Essay:
    """Sentences cut to a number of words; read again from the start when they run out."""

    def __init__(self, sentences: tuple[str, ...]):
        self._sentences = sentences
        self._ends = list(accumulate(len(sentence.split()) for sentence in sentences))

    def words(self, count: int) -> list[str]:
        """The sentences that hold the first `count` words; the last of them may be cut."""
        rounds, rest = divmod(count, self._ends[-1])
        whole = bisect_right(self._ends, rest)
        taken = [*self._sentences * rounds, *self._sentences[:whole]]
        left = rest - (self._ends[whole - 1] if whole else 0)
        if left:
            taken.append(" ".join(self._sentences[whole].split()[:left]))
        return taken
