"""Code completion: edit similarity of one line.

Definition: THUDM/LongBench, LongBench/metrics.py, with `fuzzywuzzy` on python-Levenshtein. Without python-Levenshtein
fuzzywuzzy silently takes difflib, which gives other numbers (up to 23 points lower on a line, and 0 instead of 99 on
long ones), so that state is refused.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Sequence

from kvfactory.metrics.base import METRICS

_COMMENT_MARKS = ("`", "#", "//")


@functools.cache
def _fuzz() -> types.ModuleType:
    """`fuzzywuzzy.fuzz`, checked to use its Levenshtein matcher.

    Raises:
        ValueError: fuzzywuzzy is missing, or would fall back to difflib.
    """
    install = "install it with `pip install 'fuzzywuzzy[speedup]'`"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its warning about the fallback becomes the error below
            from fuzzywuzzy import fuzz
    except ImportError:
        raise ValueError(f"code datasets need the package fuzzywuzzy for their scores; {install}.") from None
    if fuzz.SequenceMatcher.__module__ != "fuzzywuzzy.StringMatcher":
        raise ValueError(
            "code datasets need fuzzywuzzy's Levenshtein speed-up, because its difflib fallback gives other scores; "
            f"{install}."
        )
    return fuzz


def first_code_line(prediction: str) -> str:
    """First line, after leading newlines, without a backquote, "#" or "//"; it may be blank. "" when there is none."""
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in _COMMENT_MARKS):
            return line
    return ""


@METRICS.register("code_sim_score")
def code_sim_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """Similarity 2 * LCS / (n + m) of `first_code_line` and the answer in characters, rounded to whole percents."""
    return _fuzz().ratio(first_code_line(prediction), answer) / 100
