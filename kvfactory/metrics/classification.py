"""Classification: is the class named in the prediction, and how many others are named with it.

Definition: THUDM/LongBench, LongBench/metrics.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfactory.metrics.base import METRICS


def _named(prediction: str, all_classes: Sequence[str] | None) -> list[str]:
    """Classes that occur in `prediction`, in the order of `all_classes`.

    Raises:
        ValueError: the example has no list of classes.
    """
    if not all_classes or isinstance(all_classes, str):
        raise ValueError(f"classification needs the example's list of classes in all_classes, got {all_classes!r}.")
    return [name for name in all_classes if name in prediction]


def _score(named: list[str], answer: str) -> float:
    return 1.0 / len(named) if answer in named else 0.0


@METRICS.register("classification_score")
def classification_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """1 / (number of named classes) if the answer is among them, else 0.

    A named class that is part of the answer's own name is not counted. LongBench removes those while walking over the
    same list, which skips the element after each removal; published scores contain that, so it is kept.
    `clean_classification` is the form without the skip.

    Raises:
        ValueError: `all_classes` is missing.
    """
    named = _named(prediction, all_classes)
    position = 0
    while position < len(named):
        name = named[position]
        if name in answer and name != answer:
            named.remove(name)
        position += 1
    return _score(named, answer)


def clean_classification(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """As `classification_score`, with every class that is part of the answer's name left out.

    Raises:
        ValueError: `all_classes` is missing.
    """
    named = [name for name in _named(prediction, all_classes) if name == answer or name not in answer]
    return _score(named, answer)
