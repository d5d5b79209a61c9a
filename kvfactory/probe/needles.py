"""What the probe hides in a text and asks for: our own sentences about made-up people and places."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("retrieval", "reasoning")


@dataclass(frozen=True)
class Needle:
    """Something to find.

    Attributes:
        name: what trials are called by.
        sentences: inserted one after the other at one place.
        target: which of them answers the question; attention to its tokens counts.
        question, cue: the prompt ends with them; after the cue the answer follows at once, so that the few tokens
            which a reasoning trial may put out are enough, for base models too.
        answer: the whole target sentence for retrieval, a phrase of it for reasoning.
    """

    name: str
    sentences: tuple[str, ...]
    target: int
    question: str
    cue: str
    answer: str


# The answer is most of each sentence, since an output passes when it repeats more than half of the sentence's words.
_RETRIEVAL = (
    (
        "oster-quay",
        "The best thing to do on a free afternoon in Oster Quay is to rent a red canoe, paddle around the heron "
        "island, and eat smoked eel on the boathouse steps.",
        "What is the best thing to do on a free afternoon in Oster Quay?",
    ),
    (
        "clockmaker",
        "The secret of the clockmaker Ilse Brandau is to soak every brass wheel in warm vinegar, dry it over "
        "beechwood ash, and polish it with a strip of rabbit felt.",
        "What is the secret of the clockmaker Ilse Brandau?",
    ),
    (
        "night-train",
        "The way to reach the observatory at Monte Sella is to take the night train to Carva, ask the baker for the "
        "blue key, and follow the goat path above the quarry until the third gate.",
        "What is the way to reach the observatory at Monte Sella?",
    ),
)

_RETRIEVAL_CUE = "The text says:"

# (name, facts to compare, sentence that answers, sentence that distracts, question, cue, answer)
_REASONING = (
    (
        "collectors",
        "Aldo Venn is 71 years old and Petra Lisk is 34 years old.",
        "Aldo Venn collects pressed ferns.",
        "Petra Lisk collects copper buttons.",
        "What does the older of the two, Aldo Venn or Petra Lisk, collect?",
        "The older of the two collects",
        "pressed ferns",
    ),
    (
        "gardeners",
        "Doro Halm is 19 years old and Ruben Ostrow is 58 years old.",
        "Doro Halm grows white radishes.",
        "Ruben Ostrow grows black tulips.",
        "What does the younger of the two, Doro Halm or Ruben Ostrow, grow?",
        "The younger of the two grows",
        "white radishes",
    ),
    (
        "runners",
        "In the hill race Mika Sund needed 48 minutes and Lene Farrow needed 63 minutes.",
        "Mika Sund trained on the salt marsh.",
        "Lene Farrow trained on the canal towpath.",
        "Where did the faster of the two runners, Mika Sund or Lene Farrow, train?",
        "The faster of the two runners trained",
        "on the salt marsh",
    ),
    (
        "towns",
        "The town of Brackwater has 900 people and the town of Elmhollow has 12,000 people.",
        "The town of Elmhollow is known for its glass bells.",
        "The town of Brackwater is known for its plum wine.",
        "What is the larger of the two towns, Brackwater or Elmhollow, known for?",
        "The larger of the two towns is known for its",
        "glass bells",
    ),
)


def needles(kind: str) -> list[Needle]:
    """All needles of a kind; for reasoning each in two orders, the answer before and behind the distractor."""
    if kind == "retrieval":
        return [Needle(name, (text,), 0, question, _RETRIEVAL_CUE, text) for name, text, question in _RETRIEVAL]
    assert kind == "reasoning", kind
    found = []
    for name, facts, right, wrong, question, cue, answer in _REASONING:
        found.append(Needle(f"{name}-first", (facts, right, wrong), 1, question, cue, answer))
        found.append(Needle(f"{name}-second", (facts, wrong, right), 2, question, cue, answer))
    return found
