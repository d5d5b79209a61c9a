"""Passage counting: share of the numbers in the prediction that are the answer.

Definition: THUDM/LongBench, LongBench/metrics.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfactory.metrics.base import METRICS

_NUMBER = re.compile(r"\d+")  # Unicode digits too: an Arabic-Indic 7 is a number, and is not "7"


def share_equal(prediction: str, number: str) -> float:
    """Share of the digit runs in `prediction` that equal `number` as strings ("07" is not "7"); 0 without digits."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


@METRICS.register("count_score")
def count_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """`share_equal` with the answer itself."""
    return share_equal(prediction, answer)
