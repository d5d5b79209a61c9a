"""qasper: short scientific papers with sections; every figure in a paper is used once."""

from __future__ import annotations

from .draw import Bag, Draw, words
from .paper_texts import OPTIONAL, QUESTIONS, SECTIONS, TOPICS
from .record import record
from .world import World


def qasper(sizes: tuple[int, ...]) -> list[dict]:
    """Five papers on five topics; `sizes` are words of context."""
    found = []
    for index, (topic, (question, answer), size) in enumerate(zip(TOPICS, QUESTIONS, sizes, strict=True)):
        draw = Draw("qasper", index)
        world = World(draw)
        small = Bag(draw, [n for n in range(23, 99) if n % 10])
        tenths = Bag(draw, [f"{n}.{d}" for n in range(2, 20) for d in (1, 3, 6, 7, 9)])
        scores = Bag(draw, [f"{n}.{d}" for n in range(51, 89) for d in (2, 4, 8)])
        slots: dict[str, object] = dict(topic)
        slots |= {f"n{i}": world.number() for i in range(1, 7)}
        slots["n1"] = f"{draw.between(11, 39)},{draw.between(101, 989)}"  # the test part {n3} must be smaller
        slots |= {f"s{i}": small.take() for i in range(1, 9)}
        slots |= {f"d{i}": tenths.take() for i in range(1, 7)}
        slots |= {f"f{i}": scores.take() for i in range(1, 8)}
        slots |= {"lead": world.surname(), "other": world.surname(), "third": world.surname(), "place": world.town()}
        slots |= {
            "corpus": f"{world.town()}-{draw.pick(('Bank', 'Set', 'Corpus'))}",
            "model": draw.pick(topic["models"]),
        }
        body = {name: [draw.say(text, **slots) for text in paragraphs] for name, paragraphs in SECTIONS.items()}
        spare = draw.shuffled([(name, text) for name, texts in OPTIONAL.items() for text in texts])
        for name, text in spare:
            if sum(words(paragraph) for paragraphs in body.values() for paragraph in paragraphs) >= size:
                break
            body[name].append(draw.say(text, **slots))
        context = "\n\n".join("\n".join([name, *paragraphs]) for name, paragraphs in body.items()) + "\n\n"
        found.append(record("qasper", context, [str(slots[answer])], question.format(**slots)))
    return found
