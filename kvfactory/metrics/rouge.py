"""ROUGE-L with the meaning it has in the package `rouge` 1.0.1, which LongBench scores with.

That meaning is not the textbook one, so it is stated here in full:

1. Each text is cut at every "." (in numbers and abbreviations too); empty pieces are dropped, whitespace inside a
   piece is collapsed, words are split at blanks. A piece of whitespace alone stays, as one empty word. Case and
   punctuation stay.
2. Every reference piece meets every hypothesis piece: one longest common subsequence is read off the table from its end
   (equal words: take and go diagonally; else up, towards a shorter reference, only if strictly better; else left). The
   words of all of them form one SET.
3. Precision and recall divide the size of that set by the numbers of DISTINCT words; F has 1e-8 in its denominator.

Repetition is therefore never punished and a perfect score is 0.999999995. The implementation is our own and iterative:
the package walks back recursively and fails on pieces of about 990 words. It never imports a module named `rouge`,
because other packages install a different one under that name.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfactory.metrics.base import METRICS
from kvfactory.metrics.chinese import segment


def _pieces(text: str) -> list[list[str]]:
    """Pieces of `text` between dots, each as its list of words; a whitespace-only piece is [""]."""
    return [" ".join(piece.split()).split(" ") for piece in text.split(".") if piece]


def _lcs_words(reference: list[str], hypothesis: list[str]) -> set[str]:
    """Words on the one longest common subsequence that the walk described above finds."""
    width = len(hypothesis) + 1
    table = [[0] * width]
    for word in reference:
        above = table[-1]
        row = [0] * width
        for j, other in enumerate(hypothesis, 1):
            if word == other:
                row[j] = above[j - 1] + 1
            else:
                row[j] = above[j] if above[j] > row[j - 1] else row[j - 1]
        table.append(row)
    words = set()
    i, j = len(reference), len(hypothesis)
    while i and j:
        if reference[i - 1] == hypothesis[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def rouge_l(hypothesis: str, reference: str) -> float:
    """F of ROUGE-L as defined in this module; 0 when either text is empty or holds nothing but dots."""
    hypothesis_pieces, reference_pieces = _pieces(hypothesis), _pieces(reference)
    if not hypothesis_pieces or not reference_pieces:
        return 0.0
    hypothesis_sets = [set(piece) for piece in hypothesis_pieces]
    reference_sets = [set(piece) for piece in reference_pieces]
    found: set[str] = set()
    for piece, words in zip(reference_pieces, reference_sets, strict=True):
        for other, other_words in zip(hypothesis_pieces, hypothesis_sets, strict=True):
            # A pair without a common word that is still missing cannot change the set; this saves most tables.
            if (words & other_words) - found:
                found |= _lcs_words(piece, other)
    recall = len(found) / len(set().union(*reference_sets))
    precision = len(found) / len(set().union(*hypothesis_sets))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


@METRICS.register("rouge_score")
def rouge_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F over blank-separated words."""
    return rouge_l(prediction, answer)


@METRICS.register("rouge_zh_score")
def rouge_zh_score(prediction: str, answer: str, all_classes: Sequence[str] | None = None) -> float:
    """ROUGE-L F over jieba words, punctuation kept."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(answer)))


def rouge_score_package(prediction: str, answer: str) -> dict[str, float]:
    """F of rougeL and rougeLsum by Google's `rouge-score` package (no stemmer), for comparison with other harnesses.

    It keeps only [a-z0-9], so it means nothing for Chinese. rougeLsum takes newlines as sentence ends.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise ValueError(
            "the columns rougeL_rs and rougeLsum_rs need the package rouge-score; "
            "install it with `pip install rouge-score`."
        ) from None
    scores = rouge_scorer.RougeScorer(["rougeL", "rougeLsum"]).score(answer, prediction)
    return {"rougeL_rs": float(scores["rougeL"].fmeasure), "rougeLsum_rs": float(scores["rougeLsum"].fmeasure)}
