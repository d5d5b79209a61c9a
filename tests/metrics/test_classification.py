"""Classification with LongBench's skip, and without it."""

from __future__ import annotations

import pytest

from kvfactory.metrics.classification import classification_score, clean_classification

CLASSES = ["A", "AB", "ABC", "ABCD", "x"]


# (prediction, answer, LongBench's value as measured, value without the skip)
@pytest.mark.parametrize(
    "prediction, answer, expected, clean",
    [
        ("ABCD", "ABCD", 0.5, 1.0),
        ("ABC x", "ABC", 1 / 3, 0.5),
        ("AB", "AB", 1.0, 1.0),
        ("x", "A", 0.0, 0.0),
        ("", "A", 0.0, 0.0),
        ("ABCD", "AB", 1 / 3, 1 / 3),  # A is part of AB and goes, ABC and ABCD are not and stay
    ],
)
def test_vectors(prediction, answer, expected, clean):
    assert classification_score(prediction, answer, CLASSES) == pytest.approx(expected, abs=1e-15)
    assert clean_classification(prediction, answer, CLASSES) == pytest.approx(clean, abs=1e-15)


def test_the_given_list_is_left_alone():
    classes = list(CLASSES)
    classification_score("ABCD", "ABCD", classes)
    assert classes == CLASSES


@pytest.mark.parametrize("missing", [None, [], "abc"])
def test_missing_classes_are_an_error(missing):
    with pytest.raises(ValueError, match="all_classes"):
        classification_score("A", "A", missing)
