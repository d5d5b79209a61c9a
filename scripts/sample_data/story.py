"""narrativeqa: a journey told in episodes, each with facts of its own; the question is about one of them."""

from __future__ import annotations

from .draw import Bag, Draw, words
from .record import record
from .story_texts import ENDINGS, EPISODES, OPENINGS, THINGS
from .world import World

# (episode the question is about, its relative place among the episodes)
_ASKED = (("ferry", 0.5), ("library", 0.2), ("orchard", 0.9), ("smith", 0.0), ("pass", 0.65))
_TRADES = ("a bookbinder", "a lens grinder", "a schoolmaster's daughter", "a lamplighter", "a saddler")


def _slots(world: World, bags: dict[str, Bag], shared: dict[str, str]) -> dict[str, str]:
    """Fresh things for one episode beside the names that the whole story shares."""
    other = world.person()
    fresh = {key: bag.take() for key, bag in bags.items()}
    pronouns = {"o_he": other.slots["he"], "o_him": other.slots["him"], "o_his": other.slots["his"]}
    return {**shared, **fresh, **pronouns, "other": other.name, "other_first": other.first, "town": world.town()}


def narrativeqa(sizes: tuple[int, ...]) -> list[dict]:
    """Five stories; `sizes` are words of context."""
    found = []
    for index, ((asked, place), size) in enumerate(zip(_ASKED, sizes, strict=True)):
        draw = Draw("narrativeqa", index)
        world = World(draw)
        bags = {key: Bag(draw, things) for key, things in THINGS.items()}
        hero, friend = world.person(), world.person()
        shared = {
            "hero": hero.first,
            "hero_name": hero.name,
            "he": hero.slots["he"],
            "him": hero.slots["him"],
            "his": hero.slots["his"],
            "friend": friend.first,
            "home": world.town(),
            "goal": world.town(),
            "trade": _TRADES[index] if hero.woman or "daughter" not in _TRADES[index] else "a cooper",
        }
        # both ends count towards the size; the other episodes fill what is left
        start = draw.say(OPENINGS[index], **_slots(world, bags, shared))
        end = draw.say(ENDINGS[index], **_slots(world, bags, shared))
        template, question, answer = EPISODES[asked]
        slots = _slots(world, bags, shared)
        episode = draw.say(template, **slots)
        rest = []
        for name in draw.shuffled([name for name in EPISODES if name != asked]):
            if words(start) + words(end) + words(episode) + sum(map(words, rest)) >= size:
                break
            rest.append(draw.say(EPISODES[name][0], **_slots(world, bags, shared)))
        rest.insert(round(place * len(rest)), episode)
        context = "\n\n".join([world.title().upper(), start, *rest, end]) + "\n\n"
        found.append(record("narrativeqa", context, [slots[answer]], question.format(**slots)))
    return found
