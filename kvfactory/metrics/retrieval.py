"""Passage retrieval: share of the numbers in the prediction that name the right paragraph.

Definition: THUDM/LongBench, LongBench/metrics.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvfactory.metrics.base import METRICS
from kvfactory.metrics.count import share_equal


def _paragraph(answer: str, word: str) -> str:
    """Number of the paragraph in an answer such as "Paragraph 12".

    Raises:
        ValueError: the answer names no paragraph, so it cannot be scored.
    """
    match = re.search(word + r"(\d+)", answer)
    if match is None:
        raise ValueError(f"the answer {answer!r} of a retrieval dataset must hold '{word}' and a number.")
    return match.group(1)


@METRICS.register("retrieval_score")
def retrieval_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """English answers, "Paragraph 12"."""
    return share_equal(prediction, _paragraph(answer, "Paragraph "))


@METRICS.register("retrieval_zh_score")
def retrieval_zh_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """Chinese answers, "段落12"."""
    return share_equal(prediction, _paragraph(answer, "段落"))
