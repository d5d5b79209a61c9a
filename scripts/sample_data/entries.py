"""Short encyclopaedia entries about the fictional world: the building blocks of passages and paragraphs.

An entry states each of its facts in exactly one sentence. Links to other entries (a birthplace, a founder) can be
given, which is how questions over several passages are built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .entry_texts import ENTRY_TEXTS, KNOWN_FOR
from .world import World


@dataclass
class Entry:
    """A titled text.

    Attributes:
        kind: key of `ENTRY_TEXTS`.
        core: sentences that state the facts, in reading order.
        extra: sentences that may follow.
        abstract: the facts once more, in other words.
        questions: (question, answer) pairs about the facts.
        facts: the drawn values by slot name.
    """

    kind: str
    title: str
    core: list[str]
    extra: list[str]
    abstract: str
    questions: list[tuple[str, str]]
    facts: dict[str, object] = field(default_factory=dict)

    def text(self, extras: int) -> str:
        """One paragraph with `extras` additional sentences (as many as there are)."""
        return " ".join(self.core + self.extra[:extras])


def _entry(world: World, kind: str, title: str, facts: dict[str, object]) -> Entry:
    draw, texts = world.draw, ENTRY_TEXTS[kind]
    facts = {"title": title, **facts}
    core = [draw.say(template, **facts) for template in texts["core"]]
    # the first sentence introduces the subject; the others may come in any order
    core[1:] = draw.shuffled(core[1:])
    extra = [draw.say(template, **facts) for template in draw.shuffled(texts["extra"])]
    questions = [(question.format(**facts), str(facts[slot])) for question, slot in texts["questions"]]
    return Entry(kind, title, core, extra, draw.say(texts["abstract"], **facts), questions, facts)


def person(world: World, **given: object) -> Entry:
    """An engineer, writer, painter ...; given may hold who, birthplace, school, known, role, father, spouse, born."""
    draw = world.draw
    who = given.pop("who", None) or world.person()
    role = given.pop("role", None) or draw.pick(list(KNOWN_FOR))
    born = draw.between(1824, 1934)
    father = given.pop("father", None) or world.person(woman=False, last=who.last).name
    facts = {
        "role": role,
        "known": draw.pick(KNOWN_FOR[role]),
        "born": born,
        "birthplace": world.town(),
        "school": world.school(),
        "spouse": world.person(woman=not who.woman).name,
        "married": born + draw.between(24, 38),
        "father": father,
    }
    return _entry(world, "person", who.name, {**facts, **given, **who.slots})


def town(world: World, **given: object) -> Entry:
    """A town with its river, region, population and festival."""
    draw = world.draw
    name = given.pop("name", None) or world.town()
    facts = {
        "river": world.river(),
        "region": world.region(),
        "population": world.number(),
        "trade": draw.pick(ENTRY_TEXTS["town"]["trades"]),
        "festival": f"{draw.pick(ENTRY_TEXTS['town']['festivals'])} of {name}",
    }
    return _entry(world, "town", str(name), {**facts, **given})


def company(world: World, **given: object) -> Entry:
    """A firm with founder, year, seat and product."""
    draw = world.draw
    facts = {
        "founder": world.person().name,
        "year": world.year(),
        "seat": world.town(),
        "product": draw.pick(ENTRY_TEXTS["company"]["products"]),
        "staff": world.number(),
    }
    return _entry(world, "company", str(given.pop("name", None) or world.company()), {**facts, **given})


def school(world: World, **given: object) -> Entry:
    """A school with town, year and first principal."""
    name = str(given.pop("name", None) or world.school())
    facts = {"place": world.town(), "year": world.year(), "principal": world.person().name}
    facts["colour"] = world.draw.pick(ENTRY_TEXTS["school"]["colours"])
    return _entry(world, "school", name, {**facts, **given})


def novel(world: World, **given: object) -> Entry:
    """A novel with author, year, setting and prize."""
    facts = {"author": world.person().name, "year": world.year(), "setting": world.town()}
    facts["plot"] = world.draw.pick(ENTRY_TEXTS["novel"]["plots"])
    return _entry(world, "novel", str(given.pop("name", None) or world.title()), {**facts, **given})


def film(world: World, **given: object) -> Entry:
    """A film with director, year, leading player and place of shooting."""
    facts = {
        "director": world.person().name,
        "year": world.film_year(),
        "star": world.person().name,
        "setting": world.town(),
        "plot": world.draw.pick(ENTRY_TEXTS["film"]["plots"]),
    }
    return _entry(world, "film", str(given.pop("name", None) or world.title()), {**facts, **given})


def bridge(world: World, **given: object) -> Entry:
    """A bridge with designer, town, year and length."""
    place = given.pop("place", None) or world.town()
    facts = {
        "place": place,
        "designer": world.person().name,
        "year": world.year(),
        "metres": world.draw.between(84, 690),
        "material": world.draw.pick(ENTRY_TEXTS["bridge"]["materials"]),
    }
    return _entry(world, "bridge", str(given.pop("name", None) or f"{world.surname()} Bridge"), {**facts, **given})


def museum(world: World, **given: object) -> Entry:
    """A museum with town, architect, year and most famous object."""
    subject = world.draw.pick(list(ENTRY_TEXTS["museum"]["prides"]))
    facts = {
        "subject": subject.lower(),
        "place": world.town(),
        "architect": world.person().name,
        "year": world.year(),
        "pride": ENTRY_TEXTS["museum"]["prides"][subject],
    }
    name = str(given.pop("name", None) or f"{world.surname()} {subject} Museum")
    return _entry(world, "museum", name, {**facts, **given})


def ship(world: World, **given: object) -> Entry:
    """A ship with builder, year of launch, first captain and end."""
    facts = {
        "builder": world.shipyard(),
        "year": world.year(),
        "captain": world.person().name,
        "kind": world.draw.pick(ENTRY_TEXTS["ship"]["kinds"]),
        "port": world.town(),
    }
    return _entry(world, "ship", str(given.pop("name", None) or world.ship()), {**facts, **given})


def apple(world: World, **given: object) -> Entry:
    """An apple variety with breeder, town, year and taste."""
    facts = {
        "breeder": world.person().name,
        "place": world.town(),
        "year": world.year(),
        "taste": world.draw.pick(ENTRY_TEXTS["apple"]["tastes"]),
    }
    return _entry(world, "apple", str(given.pop("name", None) or world.apple()), {**facts, **given})


MAKERS: tuple[Callable[..., Entry], ...] = (person, town, company, school, novel, film, bridge, museum, ship, apple)
