"""multifieldqa_en: five kinds of document that are made of many similar entries, one of which holds the answer."""

from __future__ import annotations

from .document_texts import DOCUMENTS, WARES
from .draw import Bag, Draw, words
from .record import record
from .world import World

# relative place of the entry that the question is about
_PLACES = (0.4, 0.8, 0.1, 0.95, 0.6)


def _entry_slots(draw: Draw, world: World, bags: dict[str, Bag], number: int, year: int) -> dict[str, object]:
    """Fresh values for one entry."""
    who = world.person()
    return {
        **{key: bag.take() for key, bag in bags.items()},
        **who.slots,
        "no": number,
        "year": year,
        "amount": world.number(),
        "town": world.town(),
        "small": draw.between(3, 29),
    }


def multifieldqa_en(sizes: tuple[int, ...]) -> list[dict]:
    """Five documents; `sizes` are words of context."""
    found = []
    for index, (document, place, size) in enumerate(zip(DOCUMENTS, _PLACES, sizes, strict=True)):
        draw = Draw("multifieldqa_en", index)
        world = World(draw)
        bags = {key: Bag(draw, WARES[key]) for key in document["bags"]}
        templates = Bag(draw, document["entries"], again=True)
        head = draw.say(document["head"], place=world.town(), firm=world.company(), who=world.person().name)
        years = sorted(world.year() for _ in range(40))  # entries are in the order of time
        entries, slots = [], []
        while words(head) + sum(map(words, entries)) < size and all(map(len, bags.values())):
            slots.append(_entry_slots(draw, world, bags, len(entries) + 1, years[len(entries)]))
            entries.append(draw.say(templates.take(), **slots[-1]))
        asked = slots[int(place * len(slots))]
        context = "\n\n".join([head, *entries, draw.say(document["tail"])]) + "\n\n"
        question, answer = document["question"]
        found.append(record("multifieldqa_en", context, [str(asked[answer])], question.format(**asked)))
    return found
