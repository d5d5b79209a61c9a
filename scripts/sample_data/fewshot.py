"""trec, triviaqa and samsum: worked examples in the context, one more of the same kind as input."""

from __future__ import annotations

from . import entries
from .draw import Bag, Draw, words
from .fewshot_texts import CLASSES, DIALOGUES, FILLERS, Dialogue
from .record import record
from .world import World

# classes of each trec record, and the class of its last question
_TREC = (
    ((0, 1, 2, 3, 4, 5), 3),
    ((2, 3, 4, 5, 6, 7, 8), 7),
    ((0, 1, 3, 5, 6, 7, 8, 9), 0),
    ((0, 1, 2, 3, 4, 6, 7, 8, 9), 4),
    (tuple(range(10)), 8),
)
# dialogue that each samsum record asks about
_SAMSUM = (1, 6, 16, 5, 13)


def _questions(draw: Draw, world: World, name: str) -> list[str]:
    """Different questions of one class, in a drawn order."""
    found = []
    for template in CLASSES[name]:
        for thing in draw.sample(FILLERS, 2 if "{" in template else 1):
            slots = {"thing": thing, "town": world.town(), "firm": world.company(), "who": world.person().name}
            found.append(draw.say(template, **slots))
    return draw.shuffled(found)


def trec(sizes: tuple[int, ...]) -> list[dict]:
    """The type of a question; `sizes` are words of context."""
    found = []
    names = list(CLASSES)
    for index, ((numbers, asked), size) in enumerate(zip(_TREC, sizes, strict=True)):
        draw = Draw("trec", index)
        # every class draws from a world of its own, or the surnames would run out
        pools = {names[i]: Bag(draw, _questions(draw, World(Draw("trec", index, i)), names[i])) for i in numbers}
        question = f"Question: {pools[names[asked]].take()}\nType:"
        shots: list[str] = []
        while sum(map(words, shots)) < size and any(map(len, pools.values())):
            name = draw.pick([name for name, pool in pools.items() if len(pool)])
            shots.append(f"Question: {pools[name].take()}\nType: {name}")
        classes = [names[i] for i in numbers]
        found.append(record("trec", "\n".join(shots), [names[asked]], question, all_classes=classes))
    return found


def triviaqa(sizes: tuple[int, ...]) -> list[dict]:
    """A question about one passage, after other passages with questions and answers; `sizes` are words of context."""
    found = []
    for index, size in enumerate(sizes):
        draw = Draw("triviaqa", index)
        world = World(draw)
        makers = Bag(draw, entries.MAKERS, again=True)

        def shot(world: World = world, makers: Bag = makers, draw: Draw = draw) -> tuple[str, str]:
            entry = makers.take()(world)
            question, answer = draw.pick(entry.questions)
            passage = f"Passage:\n{entry.title}\n{entry.text(draw.between(2, 6))}"
            return f"{passage}\nQuestion:\n{question}\nAnswer:", answer

        asked, answer = shot()
        shots: list[str] = []
        while sum(map(words, shots)) + words(asked) < size:
            shots.append("\n".join(shot()))
        found.append(record("triviaqa", "\n".join(shots), [answer], asked))
    return found


def samsum(sizes: tuple[int, ...]) -> list[dict]:
    """The summary of one dialogue after others with theirs; `sizes` are words of context."""
    found = []
    for index, (last, size) in enumerate(zip(_SAMSUM, sizes, strict=True)):
        draw = Draw("samsum", index)
        world = World(draw)
        topics = Bag(draw, [dialogue for i, dialogue in enumerate(DIALOGUES) if i != last])

        def shot(dialogue: Dialogue, world: World = world, draw: Draw = draw) -> tuple[str, str]:
            talk, summary, choices = dialogue
            a, b = world.person(), world.person()
            slots = {"a": a.first, "b": b.first, "c": world.person().first, "town": world.town()}
            slots |= {"he": a.slots["he"], "his": a.slots["his"], "b_he": b.slots["he"]}
            slots |= {key: draw.pick(values) for key, values in choices.items()}
            turns = draw.say(talk, **slots).replace("\n", "\r\n")
            return f"Dialogue: {turns}\nSummary:", draw.say(summary, **slots)

        asked, summary = shot(DIALOGUES[last])
        shots: list[str] = []
        while sum(map(words, shots)) + words(asked) < size and len(topics):
            shots.append(" ".join(shot(topics.take())))
        found.append(record("samsum", "\n".join(shots), [summary], asked))
    return found
