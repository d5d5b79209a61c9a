"""Passage counting: digit runs are compared as strings."""

from __future__ import annotations

import pytest

from kvfactory.metrics.count import count_score


@pytest.mark.parametrize(
    "prediction, expected",
    [
        ("There are 7 or 8, so 7", 2 / 3),
        ("07", 0.0),
        ("\u0667 7", 0.5),  # an Arabic-Indic seven is a number, but not the string "7"
        ("77", 0.0),
        ("seven", 0.0),
        ("", 0.0),
    ],
)
def test_vectors(prediction, expected):
    assert count_score(prediction, "7") == expected
