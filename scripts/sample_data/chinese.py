"""multifieldqa_zh and passage_retrieval_zh: the same ideas in Chinese, at a few hundred to 1,300 characters."""

from __future__ import annotations

from .chinese_texts import DOCUMENTS, FILLERS, GIVEN, PARAGRAPHS, PLACE_HEADS, PLACE_TAILS, SURNAMES
from .draw import Bag, Draw
from .record import record

# relative place of the fact that each multifieldqa_zh question is about; place of each summarised paragraph
_PLACES = (0.5, 0.85, 0.05, 0.7, 0.3)
_RETRIEVAL = ((6, 4), (9, 2), (13, 12), (16, 7), (19, 17))


class _Names:
    """Chinese names; each is drawn once."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self._people = Bag(draw, [last + first for last in SURNAMES for first in GIVEN])
        self._places = Bag(draw, [head + tail for head in PLACE_HEADS for tail in PLACE_TAILS])
        self._years = Bag(draw, range(1851, 1989))
        self._numbers = Bag(draw, range(113, 987))
        self._fillers = {key: Bag(draw, values) for key, values in FILLERS.items()}

    def slots(self) -> dict[str, object]:
        """Fresh values for one entry."""
        found: dict[str, object] = {key: bag.take() for key, bag in self._fillers.items() if len(bag)}
        found |= {"人": self._people.take(), "友": self._people.take(), "地": self._places.take()}
        return found | {"乡": self._places.take(), "年": self._years.take(), "数": self._numbers.take()}

    @property
    def left(self) -> int:
        """Entries that can still be drawn."""
        return min(map(len, self._fillers.values()))


def multifieldqa_zh(sizes: tuple[int, ...]) -> list[dict]:
    """Five documents of entries; `sizes` are characters of context."""
    found = []
    for index, (document, place, size) in enumerate(zip(DOCUMENTS, _PLACES, sizes, strict=True)):
        draw = Draw("multifieldqa_zh", index)
        names = _Names(draw)
        templates = Bag(draw, document["entries"], again=True)
        head = draw.say(document["head"], **names.slots())
        years = sorted(draw.sample(range(1851, 1989), 30))  # entries are in the order of time
        slots, entries = [], []
        while len(head) + sum(map(len, entries)) < size and names.left:
            slots.append(names.slots() | {"年": years[len(entries)]})
            entries.append(draw.say(templates.take(), 序=len(entries) + 1, **slots[-1]))
        asked = slots[int(place * len(slots))]
        question, answer = document["question"]
        context = "\n\n".join([head, *entries]) + "\n\n"
        text = question.format(**asked)
        found.append(record("multifieldqa_zh", context, [answer.format(**asked)], text, language="zh"))
    return found


def passage_retrieval_zh(sizes: tuple[int, ...]) -> list[dict]:
    """The input is the abstract of one paragraph; `sizes` are characters of context."""
    found = []
    for index, ((count, place), size) in enumerate(zip(_RETRIEVAL, sizes, strict=True)):
        draw = Draw("passage_retrieval_zh", index)
        names = _Names(draw)
        kinds = Bag(draw, PARAGRAPHS, again=True)
        texts, abstracts = [], []
        for _ in range(count):
            core, extra, abstract = kinds.take()
            slots = names.slots()
            text = draw.say(core, **slots)
            for sentence in draw.shuffled(extra):
                if len(text) >= size // count:
                    break
                text += draw.say(sentence, **slots)
            texts.append(text)
            abstracts.append(draw.say(abstract, **slots))
        context = "".join(f"段落{i}：{text}\n\n" for i, text in enumerate(texts, 1))
        found.append(record("passage_retrieval_zh", context, [f"段落{place}"], abstracts[place - 1], language="zh"))
    return found
