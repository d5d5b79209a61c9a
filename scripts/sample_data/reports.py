"""gov_report and multi_news: texts from drawn facts, and summaries from the same facts in other words."""

from __future__ import annotations

from .draw import Bag, Draw, listing, words
from .news_texts import DETAILS, EVENTS, REACTIONS
from .record import record
from .report_texts import AGENCIES, CLOSING, DISTRICT, SECTIONS, SUMMARY_END
from .world import World


def _report_slots(draw: Draw, world: World, agency: dict) -> dict[str, object]:
    """The facts of one report."""
    start = draw.between(1988, 2012)
    slots: dict[str, object] = dict(agency)
    slots |= {f"n{i}": world.number() for i in range(1, 9)}
    inspectors = draw.between(14, 43)
    # percentages and counts in the ranges that the sentences around them make plausible
    ranges = {"p1": (21, 64), "p2": (5, 24), "p3": (31, 56), "p4": (11, 29), "p7": (25, 74), "p8": (17, 68)}
    ranges |= {"p9": (33, 79), "p10": (12, 48), "p11": (22, 71), "p12": (4, 19)}
    slots |= {key: draw.between(*span) for key, span in ranges.items()}
    slots |= {"p5": inspectors, "p6": inspectors + draw.between(8, 30)}
    slots |= {"year": start, "last": start + draw.between(5, 9), "director": world.person().name, "town": world.town()}
    return slots


def gov_report(sizes: tuple[int, ...]) -> list[dict]:
    """Five audit reports; `sizes` are words of context."""
    found = []
    for index, (agency, size) in enumerate(zip(AGENCIES, sizes, strict=True)):
        draw = Draw("gov_report", index)
        world = World(draw)
        slots = _report_slots(draw, world, agency)
        body, summary = [], []
        close = draw.say(CLOSING, **slots)
        for heading, text, point in SECTIONS:
            if sum(map(words, body)) + words(close) >= size and len(body) >= 4:
                break
            body.append(f"{heading}\n{draw.say(text, **slots)}")
            summary.append(draw.say(point, **slots))
        places, visits = [], []
        while sum(map(words, [*body, *visits])) + words(close) < size and len(visits) < 12:
            facts = {"place": world.town(), "sites": draw.between(11, 48), "late": draw.between(3, 10)}
            places.append(facts | {"head": world.person().name, "cost": world.number()})
            visits.append(draw.say(DISTRICT, **slots, **places[-1]))
        if visits:
            body.append("\n".join(["Results by District", *visits]))
            worst = max(places, key=lambda facts: int(facts["cost"].replace(",", "")))["place"]
            names = listing([facts["place"] for facts in places])
            summary.append(f"District visits covered {names}; repair costs were highest in {worst}.")
        context = "\n\n".join([*body, close]) + "\n\n"
        summary.append(draw.say(SUMMARY_END, **slots))
        found.append(record("gov_report", context, [" ".join(summary)]))
    return found


def multi_news(sizes: tuple[int, ...]) -> list[dict]:
    """Five events, each told by two to five newspapers; `sizes` are words of context."""
    found = []
    for index, (event, size) in enumerate(zip(EVENTS, sizes, strict=True)):
        draw = Draw("multi_news", index)
        world = World(draw)
        speaker, witness = world.person(), world.person()
        slots: dict[str, object] = {
            "town": world.town(),
            "river": world.river(),
            "speaker": speaker.name,
            "speaker_last": speaker.last,
            "witness": witness.name,
            "witness_last": witness.last,
            "number": world.number(),
            "small": draw.between(13, 49),
            "days": draw.between(4, 11),
            "sum": f"{draw.between(2, 9)}.{draw.between(1, 9)} million",
            "day": draw.pick(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
            "firm": world.company(),
        }
        articles = [draw.say(text, **slots) for text in event["articles"]]
        details, reactions = Bag(draw, DETAILS), Bag(draw, REACTIONS)
        while sum(map(words, articles)) < size and len(details) and len(reactions):
            turn = articles.index(min(articles, key=words))
            other = {"name": (person := world.person()).name, "last": person.last, "place": world.town()}
            bag = details if len(details) >= len(reactions) else reactions
            articles[turn] += " NEWLINE_CHAR NEWLINE_CHAR " + draw.say(bag.take(), **slots, **other)
        context = "\n".join(f"Passage {i}:\n{text}" for i, text in enumerate(articles, 1)) + "\n\n"
        found.append(record("multi_news", context, [draw.say(event["summary"], **slots)]))
    return found
