"""The text that needles are hidden in: any local text files, or an endless generated one."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GENERATED = "generated"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")


@dataclass(frozen=True)
class Haystack:
    """Sentences to fill a prompt with; read again from the start when they run out.

    Attributes:
        source: "generated", or the names of the files.
        sha256: of the sentences in order.
    """

    sentences: tuple[str, ...]
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\n".join(self.sentences).encode("utf-8", "surrogatepass")).hexdigest()

    def __iter__(self) -> Iterator[str]:
        while True:
            yield from self.sentences


def read_texts(path: str | Path, flag: str = "--haystack_dir") -> dict[str, str]:
    """{file name: text} of a text file, or of all *.txt files of a folder in the order of their names.

    Args:
        flag: what the user gave the path with, for messages.

    Raises:
        ValueError: nothing there, no *.txt file, no text, or a file that is not UTF-8.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise ValueError(f"{flag} {path} holds no .txt file to hide needles in")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(
            f"{flag} {path} does not exist: give a folder of .txt files or one text file, or leave it out for "
            "generated text"
        )
    texts = {}
    for file in files:
        try:
            texts[file.name] = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ValueError(f"{flag}: {file} cannot be read as UTF-8 text ({error})") from error
    if not any(text.strip() for text in texts.values()):
        raise ValueError(f"{flag} {path} holds no text to hide needles in")
    return texts


def read_haystack(path: str | Path, seed: int, flag: str = "--haystack_dir") -> Haystack:
    """The sentences of a text file, or of all *.txt files of a folder in an order drawn from `seed`.

    Raises:
        ValueError: as `read_texts`.
    """
    texts = list(read_texts(path, flag).items())
    random.Random(seed).shuffle(texts)
    sentences = [" ".join(piece.split()) for _, text in texts for piece in _SENTENCE_END.split(text) if piece.strip()]
    return Haystack(tuple(sentences), ", ".join(name for name, _ in texts))


_PLACES = (
    "the harbour", "the old mill", "the upper village", "the market square", "the river bank", "the school house",
    "the stone bridge", "the north field", "the railway yard", "the chapel garden", "the lower meadow", "the inn",
)  # fmt: skip
_PEOPLE = (
    "the miller", "a retired teacher", "the postman", "two of the fishermen", "the schoolmaster", "a travelling tailor",
    "the harbour pilot", "the widow from next door", "a young surveyor", "the carter", "the lamplighter", "the cook",
)  # fmt: skip
_DEEDS = (
    "mended the fence that the storm had pushed over", "counted the crates which had come up by barge",
    "wrote a long letter to the county office", "carried firewood into the dry shed", "argued about the price of wool",
    "looked for the dog that had slipped its lead", "painted the shutters in a dull shade of green",
    "waited for a coach that did not come", "measured the depth of the well with a knotted rope",
    "told the children how the bell had been cast", "swept the leaves out of the gutter",
    "sold the last of the winter apples",
)  # fmt: skip
_TIMES = (
    "Early in the morning", "Shortly before noon", "In the second week of March", "On market days", "After the rain",
    "Towards evening", "When the fair was over", "In a dry summer", "Some years later", "On the day of the regatta",
)  # fmt: skip
_REMARKS = (
    "Nobody thought much of it at the time.", "The weather stayed mild for the rest of the week.",
    "It was generally agreed that this had been sensible.", "The ledger for that year says nothing more about it.",
    "Prices rose a little and then fell again.", "There was talk of a new road, but the money was never found.",
    "By then most of the shops had closed.", "The story was told in several versions.",
)  # fmt: skip


def generated_haystack(seed: int, sentences: int = 2000) -> Haystack:
    """Plain English narrative made by rule from our own word lists; says nothing that a needle asks for."""
    draw = random.Random(seed)
    found = []
    for _ in range(sentences):
        shape = draw.randrange(4)
        who, other = draw.sample(_PEOPLE, 2)
        where, deed, when = draw.choice(_PLACES), draw.choice(_DEEDS), draw.choice(_TIMES)
        if shape == 0:
            text = f"{when}, {who} {deed} near {where}."
        elif shape == 1:
            text = f"{who[0].upper()}{who[1:]} {deed}, and {other} watched from {where}."
        elif shape == 2:
            text = f"{when}, {who} came down to {where} with {other}, who {deed}."
        else:
            text = draw.choice(_REMARKS)
        found.append(text)
    return Haystack(tuple(found), GENERATED)
