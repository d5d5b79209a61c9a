"""ROUGE-L of `rouge` 1.0.1: measured vectors, a slow literal reference, and the package where it is installed."""

from __future__ import annotations

import importlib
import random
import sys

import pytest

from kvfactory.metrics import METRICS
from kvfactory.metrics.rouge import rouge_l, rouge_score, rouge_score_package, rouge_zh_score

VECTORS = [
    ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
    ("a", "a", 0.999999995),
    ("The cat.", "the cat", 0.4999999950000001),
    ("a a a a", "a", 0.999999995),
    ("...", "a", 0.0),
    ("one two. three four. one", "one three two four", 0.999999995),
    ("", "a", 0.0),
    ("a", "", 0.0),
    ("a", "..", 0.0),
    # a piece of whitespace is the empty word: {a, ""} against {a}, P = 1/2, R = 1 (measured with the package)
    ("a. ", "a", 0.6666666622222223),
    (" ", " ", 0.999999995),
]


@pytest.mark.parametrize("hypothesis, reference, expected", VECTORS)
def test_measured_vectors(hypothesis, reference, expected):
    assert rouge_l(hypothesis, reference) == expected
    assert rouge_score(hypothesis, reference) == expected


def test_measured_chinese_vector():
    assert rouge_zh_score("今天天气很好。我们去公园", "今天天气不错，我们去公园玩") == 0.5714285664285715


def literal_rouge_l(hypothesis: str, reference: str) -> float:
    """The definition of the module docstring word for word, with a recursive walk and a table in a dict."""

    def pieces(text):
        return [" ".join(p.split()).split(" ") for p in text.split(".") if len(p) > 0]

    def longest(x, y):
        length = {}
        for i in range(len(x) + 1):
            for j in range(len(y) + 1):
                if i == 0 or j == 0:
                    length[i, j] = 0
                elif x[i - 1] == y[j - 1]:
                    length[i, j] = length[i - 1, j - 1] + 1
                else:
                    length[i, j] = max(length[i - 1, j], length[i, j - 1])

        def walk(i, j):
            if i == 0 or j == 0:
                return set()
            if x[i - 1] == y[j - 1]:
                return walk(i - 1, j - 1) | {x[i - 1]}
            return walk(i - 1, j) if length[i - 1, j] > length[i, j - 1] else walk(i, j - 1)

        return walk(len(x), len(y))

    hyp, ref = pieces(hypothesis), pieces(reference)
    if not hyp or not ref:
        return 0.0
    found = set()
    for r in ref:
        for h in hyp:
            found |= longest(r, h)
    recall = len(found) / len({w for r in ref for w in r})
    precision = len(found) / len({w for h in hyp for w in h})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def random_text(draw: random.Random) -> str:
    """Few distinct words (many ties), dots with and without blanks, empty pieces, newlines and tabs."""
    words = [f"w{i}" for i in range(draw.choice([2, 4, 9, 25]))]
    parts = []
    for _ in range(draw.randint(0, 24)):
        parts.append(draw.choice(words))
        parts.append(draw.choice([" ", " ", " ", " ", "  ", "\n", ". ", ".", ".. ", "\t"]))
    return "".join(parts)


def test_equals_the_literal_definition():
    draw = random.Random(0)
    for _ in range(600):
        hypothesis, reference = random_text(draw), random_text(draw)
        assert rouge_l(hypothesis, reference) == literal_rouge_l(hypothesis, reference), (hypothesis, reference)


def test_equals_the_rouge_package():
    try:
        package = importlib.import_module("rouge")
        scorer = package.Rouge()
        shadowed = scorer.get_scores(["a a"], ["a"])[0]["rouge-l"]["f"] != 0.999999995
    except ImportError:
        pytest.skip("the package rouge 1.0.1 is not installed (it is no dependency)")
    if shadowed:
        pytest.skip("the installed module rouge is not rouge 1.0.1 (rouge-chinese installs the same name)")
    draw = random.Random(1)
    for _ in range(3000):
        hypothesis, reference = random_text(draw), random_text(draw)
        try:
            expected = scorer.get_scores([hypothesis], [reference], avg=True)["rouge-l"]["f"]
        except ValueError:
            expected = 0.0  # what LongBench's bare except makes of an empty text
        assert rouge_l(hypothesis, reference) == expected, (hypothesis, reference)


def test_long_pieces_need_no_recursion():
    text = " ".join(f"w{i}" for i in range(1500))
    assert rouge_l(text, text) == 0.999999995
    assert rouge_l(text, text.replace("w0 ", "x ")) == pytest.approx(1499 / 1500, abs=1e-7)


def test_a_foreign_rouge_module_changes_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", object())
    assert METRICS.get("rouge_score")("the cat sat on the mat", "the cat lay on the mat") == 0.7999999950000002


def test_rouge_score_package_columns():
    scores = rouge_score_package("The cat sat.\nA dog ran", "the cat sat\na dog ran")
    assert scores == {"rougeL_rs": 1.0, "rougeLsum_rs": 1.0}
    # order across lines: rougeL sees one sequence of 4 words with an LCS of 2, rougeLsum two sentences that both match
    crossed = rouge_score_package("c d\na b", "a b\nc d")
    assert crossed == {"rougeL_rs": 0.5, "rougeLsum_rs": 1.0}


def test_rouge_score_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ValueError, match="rouge-score"):
        rouge_score_package("a", "a")
