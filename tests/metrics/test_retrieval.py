"""Passage retrieval: the paragraph's number among the numbers of the prediction."""

from __future__ import annotations

import pytest

from kvfactory.metrics.retrieval import retrieval_score, retrieval_zh_score


@pytest.mark.parametrize(
    "prediction, expected",
    [("12, 12, 3", 2 / 3), ("Paragraph 120", 0.0), ("Paragraph 12", 1.0), ("none", 0.0)],
)
def test_vectors(prediction, expected):
    assert retrieval_score(prediction, "Paragraph 12") == expected


def test_chinese():
    assert retrieval_zh_score("段落12和3", "段落12") == 0.5
    assert retrieval_zh_score("12", "段落12") == 1.0


def test_answer_without_a_paragraph_is_an_error():
    with pytest.raises(ValueError, match="Paragraph"):
        retrieval_score("12", "12")
    with pytest.raises(ValueError, match="段落"):
        retrieval_zh_score("12", "Paragraph 12")
