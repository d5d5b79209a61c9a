"""Three scores of an answer: ROUGE-1, share of the expected words, all of them or not."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvfactory.needle.needles import Needle, words

SCORES = ("recall", "exact", "rouge1_f10")
SCORE_MAX = {"recall": 1.0, "exact": 1.0, "rouge1_f10": 10.0}


@cache
def _rouge1() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise ValueError(
            "the needle score rouge1_f10 needs the package rouge-score; install it with `pip install rouge-score`."
        ) from None
    return rouge_scorer.RougeScorer(["rouge1"], use_stemmer=True)


def needle_scores(needle: Needle, pred: str) -> dict[str, float | int]:
    """Scores of the answer `pred`; an empty one has 0 everywhere.

    - `rouge1_f10`, 0 to 10: ten times the F of ROUGE-1 (rouge-score, stemmed) between the whole needle and the answer,
      what run_needle_in_haystack.py of KVCache-Factory stores. An answer that does not repeat the question's part of
      the needle cannot reach 10.
    - `recall`, 0 to 1: share of the needle's expected words that the answer holds, what the original's visualize.py
      draws. Departure: it splits at blanks alone, so that its last expected word keeps a full stop and is found only
      at the end of a sentence, and a word of the answer before a comma is not found; here punctuation around words is
      dropped on both sides.
    - `exact`, 0 or 1: all expected words are there.

    Raises:
        ValueError: the package rouge-score is not installed.
    """
    found = len(set(needle.expected) & set(words(pred)))
    return {
        "rouge1_f10": 10 * float(_rouge1().score(needle.text, pred)["rouge1"].fmeasure),
        "recall": found / len(needle.expected),
        "exact": int(found == len(needle.expected)),
    }
