"""Our own documents and questions for the qa tasks: made-up people and towns, put together by rule.

Every fact that is asked for is a pair of words (or of syllables) that only one document gets, so no other document
holds the answer. `own_corpus` is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product


@dataclass(frozen=True)
class Question:
    """A question with its references.

    Attributes:
        text: the question.
        answers: accepted spellings; any one counts.
        gold: numbers of the documents that hold the answer.
        near: numbers of the documents on the same subject, which become distractors before all others.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Distinct documents, and the questions on them (both non-empty)."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


PEOPLE = TOWNS = 1600  # together about 300,000 tokens of documents

_FIRST_NAMES = """
Aldo Alma Anselm Berit Bruno Carla Clement Dagny Doro Edda Elias Emil Fenja Florian Greta Gustav Hanno Helma Ida Ilse
Jakob Jorun Klara Konrad Lene Leopold Marit Matteo Mika Nora Oda Oskar Petra Quentin Rosa Ruben Selma Silvan Thea Viktor
""".split()
# Surnames have seven letters and towns eight: within a kind, no name is part of another.
_SURNAME_HEADS = """
Bran Brel Cald Corv Dael Darn Drev Elmi Esko Fald Ferl Garn Gest Grim Halv Hesk Holt Ivar Jarn Jost Kasp Keld Korv Krel
Lang Lesk Lind Lund Marv Meld Morn Nesk Nord Olve Orsk Palm Pelk Prin Quil Rask Reld Rosk Sald Selk Skar Sorn Stav Svel
Tarn Telm Tosk Trel Uldo Vald Vesk Wald Welm Wisk Yorn Zeld
""".split()
_SURNAME_TAILS = """
ack aff ahl ain ald amm and ann ard arn ast att aud auk aun elk ell emb end enn erl ern ess est eth ick iel ild ill imm
ind inn irk isk iss ist ith ock off ohl oin old omm ond onn orf orn oss ost oth uck ull umm und unn urg ust
""".split()
_TOWN_HEADS = """
Alde Barr Birk Bole Crow Dane Dove Egge Fenn Firs Gale Glas Harr Hawk Ibbe Keff Kirk Lark Leck Maes Mill Ness Oaks Otte
Pell Rave Rill Rook Sand Scar Sedg Swan Tave Tern Ulle Wain Whin Wray Yarr Yewe
""".split()
_TOWN_TAILS = """
beck bide bury cote dale dell fell firt fold ford gard gate gill haus hage holm hurn keld lund mere moor nock pool quay
rick rigg sett shaw side stow thor toft wade wath well wich wick wold wood yard
""".split()
_QUALITIES = """
amber bamboo beaded birchwood blackened braided brass brazen carved chequered cobalt copper crimson enamelled engraved
felted frosted gilded hammered indigo ivory jasper lacquered leather mottled nickel painted patterned pewter polished
porcelain quilted rusted scarlet silvered speckled striped turquoise varnished wicker
""".split()
_THINGS = """
anklets baskets bells bookmarks bottles bowls boxes bracelets brooches buckles buttons candlesticks combs compasses cups
daggers dolls earrings flutes goblets hairpins hinges inkwells jugs kites ladles lanterns masks medals mirrors napkins
pipes plates puppets saddles snuffers spoons teapots thimbles whistles
""".split()
_MATERIALS = """
basalt beeswax bluestone boxwood brick bronze cedarwood cement chalk cherrywood clay concrete driftwood flint
glass gneiss granite greenstone gypsum larchwood limestone lindenwood marble mosaic pearwood pinewood plaster plumwood
pumice quartz sandstone slate soapstone steel sycamore terracotta tin travertine walnut zinc
""".split()
_CREATURES = """
badger bear beaver bittern boar buffalo camel cobra cormorant crane deer dolphin donkey dragon falcon fox gazelle goose
griffin hare hedgehog heron horse kingfisher lion lizard lynx magpie marten mermaid moose otter pelican pheasant salmon
sparrow squirrel tortoise unicorn walrus
""".split()
_TRADES = """
baker bargeman beekeeper blacksmith bookbinder carpenter chandler cobbler cooper ferryman gardener glazier miller
netmaker printer rope-maker saddler shepherd surveyor tailor thatcher weaver
""".split()
_GOODS = "barley cheese cider flax honey hops linen oats paper pears rope rye salt soap timber wool".split()
_RIVERS = "Ambra Benn Corlow Dwyle Esper Flint Garrow Hollen Isk Lorne Minna Orrin Pell Rusk Tavy Wend".split()
_NUMBERS = "three four five six seven eight nine ten eleven twelve fourteen fifteen twenty".split()

# Every sentence variant of a slot states the fact that the questions ask for.
_PERSON = (
    (
        "{name} was born in {town} in {year}, the youngest of {number} children of a {trade}.",
        "Born in {town} in {year}, {name} grew up in two rooms above the workshop of a {trade}.",
        "In the spring of {year} {name} was born in {town}, where the family had lived for {number} generations.",
        "{name} was born in {year} in {town}, during a storm that was talked about for {number} years.",
        "The parish book of {town} says that {name} was born there in {year}, the child of a {trade}.",
    ),
    (
        "After {number} years of school {surname} was apprenticed to a {trade} and learned quickly.",
        "{surname} wanted to become a {trade}, failed the first test, and passed the second with praise.",
        "For {number} years {surname} worked as a {trade}, always starting before sunrise.",
        "A cousin found {surname} a place as a {trade}, which was poorly paid but never dull.",
        "The work of a {trade} suited {surname}, who disliked noise and was in no hurry.",
    ),
    (
        "In the evenings {surname} collected {thing} and wrote down where each one had been found.",
        "{surname} collected {thing}, and the neighbours brought new ones from every fair.",
        "What made {surname} known beyond the county was a habit of collecting {thing}.",
        "Visitors came to see the {thing} that {surname} had collected since childhood.",
        "{surname} spent most of the money on {thing}, and at last had collected a whole attic of them.",
    ),
    (
        "Later {surname} moved away, came back after {number} winters, and never spoke about it.",
        "{surname} wrote {number} letters to the council about the state of the roads, all of them unanswered.",
        "A street was to be named after {surname}, but the plan was given up for want of a street.",
        "Of the diaries that {surname} kept, {number} volumes survive, most of them about the weather.",
        "{surname} lived to a great age and sang in the choir until the very last winter.",
    ),
)
_TOWN = (
    (
        "{town} lies on the river {river}, {number} miles above its mouth.",
        "On a bend of the river {river} lies {town}, a town of some {number} hundred houses.",
        "{town} is the largest town on the river {river}, though it takes only {number} minutes to cross on foot.",
        "Travellers who follow the river {river} for {number} hours reach {town}.",
        "The old road crosses the river {river} at {town}, over a bridge of {number} arches.",
    ),
    (
        "It was founded in {year} by {founder}, who had meant to stay for one night.",
        "{founder} founded the town in {year}, after a long quarrel with the neighbours downstream.",
        "The founder was {founder}, who bought the land in {year} for the price of two horses.",
        "In {year} {founder} founded it as a resting place for carts on their way to the coast.",
        "It owes its beginnings to {founder}, who founded it in {year} and drew its first map.",
    ),
    (
        "A {statue} stands in the market square and is washed once a year.",
        "The market square is known for its {statue}, which children climb in spite of the fine.",
        "In the middle of the market square stands a {statue}, turned towards the town hall.",
        "For {number} generations couples have met at the {statue} in the market square.",
        "Strangers are told to wait by the {statue} in the market square, since nobody can miss it.",
    ),
    (
        "Most families live on the trade in {goods}, and barges are loaded twice a week.",
        "The yearly fair lasts {number} days and brings buyers of {goods} from the whole valley.",
        "Trade in {goods} made it rich, and a fire in {late_year} made it poor again.",
        "Its school has {number} classes, a good library, and a roof that lets in the rain.",
        "A railway was promised in {late_year}; the station was built, the track was not.",
    ),
)


def _pairs(rng: random.Random, first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    pairs = list(product(first, second))
    rng.shuffle(pairs)
    return pairs


def _document(rng: random.Random, slots: Sequence[Sequence[str]], facts: dict[str, str]) -> str:
    """One sentence of each slot, with the facts and with details of its own that no question asks for."""
    sentences = []
    for variants in slots:
        details = {
            "trade": rng.choice(_TRADES),
            "goods": rng.choice(_GOODS),
            "river": rng.choice(_RIVERS),
            "number": rng.choice(_NUMBERS),
            "year": rng.randrange(1650, 1800),
            "late_year": rng.randrange(1800, 1900),
        }
        sentences.append(rng.choice(variants).format(**details, **facts))
    return " ".join(sentences)


@cache
def own_corpora() -> dict[str, Corpus]:
    """The corpora of both tasks over the same documents: qa_1 asks for facts of one document, qa_2 joins two.

    Person i was born in town i and in no other, so a question about the birthplace of a person has one answer.
    """
    rng = random.Random("documents of the qa tasks")
    surnames = ["".join(pair) for pair in _pairs(rng, _SURNAME_HEADS, _SURNAME_TAILS)]
    towns = ["".join(pair) for pair in _pairs(rng, _TOWN_HEADS, _TOWN_TAILS)]
    things = [" ".join(pair) for pair in _pairs(rng, _QUALITIES, _THINGS)]
    statues = _pairs(rng, _MATERIALS, _CREATURES)
    people, places, one_hop, two_hops = [], [], [], []
    for i, (town, thing, (material, creature)) in enumerate(zip(towns, things, statues, strict=True)):
        surname, founder_surname = surnames[i], surnames[TOWNS + i]
        name, founder = (f"{rng.choice(_FIRST_NAMES)} {last}" for last in (surname, founder_surname))
        statue = f"{material} {creature}"
        people.append(_document(rng, _PERSON, {"name": name, "surname": surname, "town": town, "thing": thing}))
        places.append(_document(rng, _TOWN, {"town": town, "founder": founder, "statue": statue}))
        person, place = i, PEOPLE + i
        statue_answers = (statue, f"{creature} of {material}", f"{creature} made of {material}")
        founder_answers = (founder, founder_surname)
        birthplace = f"the town in which {name} was born"
        one_hop += [
            Question(f"What did {name} collect?", (thing,), (person,)),
            Question(f"Who founded the town of {town}?", founder_answers, (place,)),
            Question(f"What stands in the market square of {town}?", statue_answers, (place,)),
        ]
        two_hops += [
            Question(f"Who founded {birthplace}?", founder_answers, (person, place)),
            Question(f"What stands in the market square of {birthplace}?", statue_answers, (person, place)),
        ]
    documents = (*people, *places)
    return {"qa_1": Corpus(documents, tuple(one_hop)), "qa_2": Corpus(documents, tuple(two_hops))}
