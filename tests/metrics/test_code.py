"""Edit similarity of code: measured vectors, the line rule, and the refusal of the difflib fallback."""

from __future__ import annotations

import difflib

import pytest

from kvfactory.metrics import code
from kvfactory.metrics.code import code_sim_score, first_code_line


# Values measured with LongBench's function on fuzzywuzzy 0.18.0 and python-Levenshtein 0.27.5.
@pytest.mark.parametrize(
    "prediction, answer, expected",
    [
        ("\n\n# c\n    x = 1\ny = 2", "    x = 1", 1.0),
        ("return a+b", "return a + b", 0.91),
        (" \nx = 1", "x = 1", 0.33),
        ("", "x", 0.0),
        ("", "", 1.0),
        ("```python\nx=1\n```", "x = 1", 0.75),
    ],
)
def test_measured_vectors(prediction, answer, expected):
    assert code_sim_score(prediction, answer) == expected


def test_long_lines_do_not_meet_difflibs_junk_rule():
    # difflib calls characters that fill more than 1 % of a text of 200 or more junk and finds nothing here
    line, answer = "ab" * 150, "b" + "ab" * 150
    assert round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) == 0
    assert code_sim_score(line, answer) == 1.0


def test_line_rule():
    assert first_code_line("\n\n \nx") == " "  # only newlines are stripped, a blank line counts
    assert first_code_line("a # b\nhttp://x\n`c`") == ""
    assert first_code_line("\r\nx") == "\r"


def test_difflib_fallback_is_refused(monkeypatch):
    from fuzzywuzzy import fuzz

    monkeypatch.setattr(fuzz, "SequenceMatcher", difflib.SequenceMatcher)
    code._fuzz.cache_clear()
    try:
        with pytest.raises(ValueError, match="speed-up.*difflib"):
            code_sim_score("a", "b")
    finally:
        code._fuzz.cache_clear()
