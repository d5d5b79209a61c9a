"""What is hidden in the haystack, what is asked, and which words an answer is looked through for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvfactory.probe.needles import needles as probe_needles

# From the first to the last letter or digit of what blanks separate: punctuation goes at the ends and stays inside.
_WORD = re.compile(r"[^\W_](?:\S*[^\W_])?")


def words(text: str) -> list[str]:
    """Lower-case words between blanks, without the punctuation around them: `On a "sunny" day.` has the word day."""
    return _WORD.findall(text.lower())


def new_words(text: str, question: str) -> tuple[str, ...]:
    """Distinct words of `text` that `question` does not hold, in order: an answer has them from the text alone."""
    return tuple(word for word in dict.fromkeys(words(text)) if word not in set(words(question)))


@dataclass(frozen=True)
class Needle:
    """One sentence to find.

    Attributes:
        name: what result rows are called by.
        text: the sentence, without blank space around it.
        question: asked after the haystack.
        expected: distinct lower-case words of the answer; recall is the share of them that is found.
    """

    name: str
    text: str
    question: str
    expected: tuple[str, ...]


# The words that carry the answer of the default needle; "and" or "around" would be found in almost any answer.
_EXPECTED = {"oster-quay": tuple("rent red canoe paddle heron island eat smoked eel boathouse steps".split())}

NEEDLES = tuple(
    Needle(n.name, n.answer, n.question, _EXPECTED.get(n.name) or new_words(n.answer, n.question))
    for n in probe_needles("retrieval")
)
DEFAULT_NEEDLE = NEEDLES[0]


def read_needle(needle_file: str | Path | None = None, question: str | None = None) -> Needle:
    """The needle of a text file, named after the file; without one the default needle.

    The whole file is one needle, and the words of it that the question does not hold are expected.

    Raises:
        ValueError: one of --needle_file and --question without the other, a file that cannot be read as UTF-8 or holds
            no word, or a question that holds all of the needle's words.
    """
    if needle_file is None:
        if question is not None:
            raise ValueError("--question is asked about the needle of --needle_file: give both, or neither")
        return DEFAULT_NEEDLE
    if question is None or not question.strip():
        raise ValueError(f"--needle_file {needle_file} needs --question, the question that its sentence answers")
    path = Path(needle_file)
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--needle_file {needle_file} cannot be read as UTF-8 text ({error})") from error
    if not words(text):
        raise ValueError(f"--needle_file {needle_file} holds no words: it must hold the one sentence to hide")
    expected = new_words(text, question)
    if not expected:
        raise ValueError(
            f"--question {question!r} holds every word of --needle_file {needle_file}, so no answer could be told from "
            "a repeated question"
        )
    return Needle(path.stem, text, question.strip(), expected)
