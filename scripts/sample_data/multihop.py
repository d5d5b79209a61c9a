"""hotpotqa, 2wikimqa and musique: questions whose answer needs two to four passages.

A chain is built from its end: every passage on it states one link and only the last one states the answer. All other
passages are of the same kinds with other names.
"""

from __future__ import annotations

from collections.abc import Callable

from . import entries
from .draw import Draw, words
from .entries import Entry
from .record import record
from .world import World

Chain = tuple[str, list[str], list[Entry]]


def _author_school(world: World) -> tuple[Entry, Entry, Entry]:
    """A novel, its author and the author's school, with years in a possible order."""
    author, college = world.person(), world.school()
    year = world.year()
    born = year - world.draw.between(27, 52)
    return (
        entries.novel(world, author=author.name, year=year),
        entries.person(world, who=author, role="a novelist", school=college, born=born, married=born + 26),
        entries.school(world, name=college, year=born - world.draw.between(21, 60)),
    )


def _ship_firm_founder(world: World) -> tuple[Entry, Entry, Entry]:
    """A ship, the yard that built it and the yard's founder."""
    yard, founder, year = world.shipyard(), world.person(), world.year()
    opened = year - world.draw.between(3, 9)
    born = opened - world.draw.between(24, 40)
    return (
        entries.ship(world, builder=yard, year=year),
        entries.company(world, name=yard, founder=founder.name, year=opened, product="ships and dredgers"),
        entries.person(world, who=founder, role="an engineer", born=born, married=born + 25),
    )


def hotpot_founder_birthplace(world: World) -> Chain:
    founder = world.person()
    firm = entries.company(world, founder=founder.name)
    maker = entries.person(world, who=founder, role="an engineer", born=firm.facts["year"] - 33)
    return f"In which town was the founder of {firm.title} born?", [maker.facts["birthplace"]], [firm, maker]


def hotpot_author_school(world: World) -> Chain:
    book, author, _ = _author_school(world)
    return f"At which school did the author of the novel {book.title} study?", [author.facts["school"]], [book, author]


def hotpot_museum_river(world: World) -> Chain:
    house = entries.museum(world)
    place = entries.town(world, name=house.facts["place"])
    river = place.facts["river"]
    question = f"Which river runs through the town where {house.title} stands?"
    return question, [river, f"River {river}"], [house, place]


def hotpot_ship_founder(world: World) -> Chain:
    ship, firm, _ = _ship_firm_founder(world)
    return f"Who founded the company that built the ship {ship.title}?", [firm.facts["founder"]], [ship, firm]


def hotpot_apple_population(world: World) -> Chain:
    tree = entries.apple(world)
    place = entries.town(world, name=tree.facts["place"])
    question = f"How many inhabitants does the town have where the first {tree.title} apple tree stood?"
    return question, [place.facts["population"]], [tree, place]


def wiki_born_first(world: World) -> Chain:
    first = entries.person(world, born=world.draw.between(1826, 1870), role="a painter")
    second = entries.person(world, born=first.facts["born"] + world.draw.between(4, 40), role="a composer")
    names = world.draw.shuffled([first.title, second.title])
    return f"Who was born first, {names[0]} or {names[1]}?", [first.title], [first, second]


def wiki_director_birthplace(world: World) -> Chain:
    director = world.person()
    film = entries.film(world, director=director.name)
    maker = entries.person(world, who=director, role="a teacher", born=film.facts["year"] - 41)
    question = f"Where was the director of the film {film.title} born?"
    return question, [maker.facts["birthplace"]], [film, maker]


def wiki_grandfather(world: World) -> Chain:
    family = world.surname()
    child, father = world.person(last=family), world.person(woman=False, last=family)
    grandfather = world.person(woman=False, last=family)
    born = world.draw.between(1880, 1920)
    young = entries.person(world, who=child, father=father.name, born=born)
    middle = entries.person(world, who=father, father=grandfather.name, born=born - 30)
    return f"Who was the paternal grandfather of {child.name}?", [grandfather.name], [young, middle]


def wiki_later_born_director(world: World) -> Chain:
    directors = [world.person(), world.person()]
    films = [entries.film(world, director=who.name) for who in directors]
    born = world.draw.between(1871, 1882)
    later = world.draw.below(2)
    years = [born, born + world.draw.between(5, 15)]
    makers = [
        entries.person(world, who=who, role="a painter", born=years[1 if i == later else 0])
        for i, who in enumerate(directors)
    ]
    question = f"Which film has the director who was born later, {films[0].title} or {films[1].title}?"
    return question, [films[later].title], [*films, *makers]


def wiki_older_company(world: World) -> Chain:
    firms = sorted((entries.company(world) for _ in range(2)), key=lambda firm: firm.facts["year"])
    names = world.draw.shuffled([firm.title for firm in firms])
    return f"Which company was founded earlier, {names[0]} or {names[1]}?", [firms[0].title], firms


def musique_school_year(world: World) -> Chain:
    book, author, college = _author_school(world)
    question = f"When was the school founded that the author of the novel {book.title} attended?"
    return question, [str(college.facts["year"])], [book, author, college]


def musique_ship_river(world: World) -> Chain:
    ship, firm, founder = _ship_firm_founder(world)
    place = entries.town(world, name=founder.facts["birthplace"])
    river = place.facts["river"]
    chain = "the birthplace of the person who founded the company that built the ship"
    question = f"Which river runs through {chain} {ship.title}?"
    return question, [river, f"River {river}"], [ship, firm, founder, place]


def musique_apple_school(world: World) -> Chain:
    breeder, college = world.person(), world.school()
    tree = entries.apple(world, breeder=breeder.name)
    born = tree.facts["year"] - 45
    grower = entries.person(world, who=breeder, role="a botanist", school=college, born=born)
    school = entries.school(world, name=college, year=born - 37)
    question = f"In which town is the school where the breeder of the {tree.title} apple studied?"
    return question, [school.facts["place"]], [tree, grower, school]


def musique_museum_spouse(world: World) -> Chain:
    architect = world.person()
    house = entries.museum(world, architect=architect.name)
    born = house.facts["year"] - 44
    builder = entries.person(world, who=architect, role="an architect", born=born, married=born + 27)
    return f"Who was the spouse of the architect of {house.title}?", [builder.facts["spouse"]], [house, builder]


def musique_bridge_festival(world: World) -> Chain:
    designer = world.person()
    bridge = entries.bridge(world, designer=designer.name)
    builder = entries.person(world, who=designer, role="an engineer", born=bridge.facts["year"] - 38)
    # the festival's usual name holds the town's, which the second passage must not give away
    place = entries.town(world, name=builder.facts["birthplace"])
    question = f"Which festival is held in the town where the designer of {bridge.title} was born?"
    return question, [place.facts["festival"]], [bridge, builder, place]


CHAINS: dict[str, tuple[Callable[[World], Chain], ...]] = {
    "hotpotqa": (
        hotpot_founder_birthplace,
        hotpot_author_school,
        hotpot_museum_river,
        hotpot_ship_founder,
        hotpot_apple_population,
    ),
    "2wikimqa": (
        wiki_born_first,
        wiki_director_birthplace,
        wiki_grandfather,
        wiki_later_born_director,
        wiki_older_company,
    ),
    "musique": (
        musique_school_year,
        musique_ship_river,
        musique_apple_school,
        musique_museum_spouse,
        musique_bridge_festival,
    ),
}


def passages(draw: Draw, world: World, needed: list[Entry], size: int) -> str:
    """`Passage 1:` blocks of about `size` words: the needed entries, in drawn places, among distractors."""
    blocks = [(entry, entry.text(draw.between(2, 5))) for entry in needed]
    makers = [maker for maker in entries.MAKERS if maker in {getattr(entries, e.kind) for e in needed}]
    while sum(words(text) + 4 for _, text in blocks) < size:
        # two of three distractors are of a kind that the question is about
        maker = draw.pick(makers if draw.below(3) else entries.MAKERS)
        other = maker(world)
        blocks.append((other, other.text(draw.between(1, 6))))
    blocks = draw.shuffled(blocks)
    return "\n".join(f"Passage {i}:\n{entry.title}\n{text}" for i, (entry, text) in enumerate(blocks, 1)) + "\n\n"


def build(dataset: str, sizes: tuple[int, ...]) -> list[dict]:
    """One record per chain of the dataset; `sizes` are words of context."""
    found = []
    for index, (chain, size) in enumerate(zip(CHAINS[dataset], sizes, strict=True)):
        draw = Draw(dataset, index)
        world = World(draw)
        question, answers, needed = chain(world)
        found.append(record(dataset, passages(draw, world, needed, size), answers, question))
    return found
