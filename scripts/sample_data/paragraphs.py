"""passage_count and passage_retrieval_en: numbered paragraphs, some of them repeated, or one of them summarised."""

from __future__ import annotations

from . import entries
from .draw import Bag, Draw, words
from .record import record
from .world import World

# distinct paragraphs and all paragraphs of each passage_count record
_COUNTS = ((6, 9), (8, 13), (7, 16), (13, 18), (17, 24))
# the official prompt of passage_retrieval_en speaks of 30 paragraphs
_RETRIEVAL_PARAGRAPHS = 30
_RETRIEVAL_PLACES = (9, 26, 3, 17, 29)


def _numbered(texts: list[str]) -> str:
    return "".join(f"Paragraph {i}: {text}\n\n" for i, text in enumerate(texts, 1))


def _distinct(draw: Draw, world: World, count: int, size: int) -> list[tuple[entries.Entry, str]]:
    """`count` different entries of about `size` words each."""
    makers = Bag(draw, entries.MAKERS, again=True)
    found = []
    for _ in range(count):
        entry = makers.take()(world)
        extras = 0
        while words(entry.text(extras)) < size and extras < len(entry.extra):
            extras += 1
        found.append((entry, entry.text(extras)))
    return found


def passage_count(sizes: tuple[int, ...]) -> list[dict]:
    """The answer is the number of different paragraphs; `sizes` are words of context."""
    found = []
    for index, ((distinct, total), size) in enumerate(zip(_COUNTS, sizes, strict=True)):
        draw = Draw("passage_count", index)
        texts = [text for _, text in _distinct(draw, World(draw), distinct, size // total)]
        repeats = [draw.pick(texts) for _ in range(total - distinct)]
        found.append(record("passage_count", _numbered(draw.shuffled(texts + repeats)), [str(distinct)]))
    return found


def passage_retrieval_en(sizes: tuple[int, ...]) -> list[dict]:
    """The input is the abstract of one paragraph, whose place is drawn beforehand; `sizes` are words of context."""
    found = []
    for index, (place, size) in enumerate(zip(_RETRIEVAL_PLACES, sizes, strict=True)):
        draw = Draw("passage_retrieval_en", index)
        chosen = _distinct(draw, World(draw), _RETRIEVAL_PARAGRAPHS, size // _RETRIEVAL_PARAGRAPHS)
        context = _numbered([text for _, text in chosen])
        abstract = chosen[place - 1][0].abstract
        found.append(record("passage_retrieval_en", context, [f"Paragraph {place}"], abstract))
    return found
