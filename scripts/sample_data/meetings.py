"""qmsum: transcripts of meetings that go through an agenda; the query is about one item of it."""

from __future__ import annotations

from .draw import Bag, Draw, words
from .meeting_texts import CLOSING, OPENING, SMALL_TALK, TOPICS
from .record import record
from .world import World

# (topic asked about, relative place among the topics, number of the query of the topic)
_ASKED = (("heating", 0.0, 0), ("logo", 0.6, 1), ("summer", 0.9, 0), ("visitors", 0.3, 1), ("van", 0.55, 0))
_ROLES = ("Chair", "Treasurer", "Engineer", "Secretary", "Designer")


def _topic(draw: Draw, world: World, talk: Bag, name: str) -> tuple[str, list[tuple[str, str]]]:
    """The turns on one topic and its (query, answer) pairs."""
    topic = TOPICS[name]
    first, second, third = draw.sample(_ROLES[1:], 3)
    slots: dict[str, object] = {"a": first, "b": second, "c": third, "who": world.person().name}
    slots |= {"n": world.number(), "m": world.number(), "weeks": draw.between(3, 19), "share": draw.between(11, 89)}
    slots |= {key: draw.pick(values) for key, values in topic["choices"].items()}
    text = draw.say(topic["turns"], **slots)
    # one turn of idle talk somewhere in between
    turns = text.split("\n")
    turns.insert(1 + draw.below(len(turns) - 1), f"{draw.pick(_ROLES)}: {talk.take()}")
    return "\n".join(turns), [(q.format(**slots), draw.say(a, **slots)) for q, a in topic["queries"]]


def qmsum(sizes: tuple[int, ...]) -> list[dict]:
    """Five meetings; `sizes` are words of context."""
    found = []
    for index, ((asked, place, query), size) in enumerate(zip(_ASKED, sizes, strict=True)):
        draw = Draw("qmsum", index)
        world = World(draw)
        talk = Bag(draw, SMALL_TALK)
        head = draw.say(OPENING, place=world.town(), firm=world.company())
        tail = draw.say(CLOSING, firm=world.company())
        needed, queries = _topic(draw, world, talk, asked)
        rest: list[str] = []
        for name in draw.shuffled([name for name in TOPICS if name != asked]):
            if sum(map(words, [head, needed, tail, *rest])) >= size:
                break
            rest.append(_topic(draw, world, talk, name)[0])
        rest.insert(round(place * len(rest)), needed)
        context = "\n".join([head, *rest, tail]) + "\n\n"
        question, answer = queries[query]
        found.append(record("qmsum", context, [answer], question))
    return found
