"""What the user sees of a run."""

from __future__ import annotations

import io
import re

import pytest

from kvfactory.reports.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_log_lines():
    out = io.StringIO()
    with Progress("qasper", 10, scores=[1.0, 0.0], every=3, stream=out) as progress:
        for score in (0.5, None, 1.0, 1.0, 0.0, 0.0, 0.0):
            progress.step(score)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"qasper 5/10, score 62\.50, 1 failed, \d+\.\d\d s/example, 00:00 left", lines[0])
    assert lines[1].startswith("qasper 8/10, score 50.00, 1 failed, ")
    assert lines[2].startswith("qasper 9/10, score 43.75, 1 failed, ")
    assert progress.score == pytest.approx(43.75)


def test_every_example_done_before():
    out = io.StringIO()
    with Progress("qasper", 2, scores=[1.0, 0.5], stream=out):
        pass
    assert out.getvalue() == "qasper 2/2, score 75.00\n"


def test_finished_run_says_so_once():
    out = io.StringIO()
    with Progress("qasper", 2, every=1, stream=out) as progress:
        progress.step(1.0)
        progress.step(0.0)
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == ["qasper 1/2", "qasper 2/2"]
    assert "left" not in out.getvalue().splitlines()[1]


def test_bar_on_a_terminal():
    out = Terminal()
    with Progress("qasper", 4, scores=[1.0], stream=out) as progress:
        assert "1/4" in out.getvalue() and "score 100.00" in out.getvalue()
        progress.step(0.0)
        progress.step(None)
        progress._bar.refresh()
        assert progress.score == 50
    last = out.getvalue().split("\r")[-1]
    assert "3/4" in last and "score 50.00, 1 failed" in last and "left" in last and ("s/ex" in last or "ex/s" in last)
    assert out.getvalue().endswith("\n")


def test_nothing_scored_yet():
    out = io.StringIO()
    with Progress("qasper", 3, stream=out) as progress:
        assert progress.score is None
        progress.step(None)
    assert out.getvalue().startswith("qasper 1/3, score -, 1 failed")
