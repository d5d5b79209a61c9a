"""Calls of a runner's `main`: flags typed out, the rows that were written, and refusals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from kvfactory.reports.records import read_lines

TIMINGS = ("prefill_s", "decode_s", "rows_in_flight", "peak_mem_bytes")
"""Fields of a row that differ between two runs of the same settings."""


def typed(flags: dict[str, Any], *switches: str) -> list[str]:
    """{flag: value} as it is typed; a flag whose value is None is a switch."""
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word is not None]
    return [str(word) for word in words] + list(switches)


def comparable(rows: Iterable[dict]) -> list[dict]:
    """Rows without their timings."""
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def rows(folder: Path) -> dict[str, list[dict]]:
    """{file below folder: comparable rows} of all result files; half a last line is no row."""
    found = [path for path in sorted(folder.rglob("*.json")) if path.parent.name != "meta"]
    return {str(path.relative_to(folder)): comparable(line.row for line in read_lines(path)[0]) for path in found}


def refused(capsys: Any, main: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Runs a call that must be refused with exit code 2 and one sentence -> the sentence."""
    capsys.readouterr()
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, ""), error
    assert error.startswith(f"{main.__module__}.py: ") and error.count("\n") == 1, error
    return error


def refused_early(capsys: Any, main: Callable, arguments: list[str], monkeypatch: Any, save_dir: Path) -> str:
    """`refused`, before weights load and with nothing written."""
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("weights were loaded"))
    error = refused(capsys, main, arguments)
    assert not list(save_dir.rglob("*.json"))
    return error


def wait_for_row(process: Popen, save_dir: Path, seconds: float = 120) -> None:
    """Returns when a runner in a process of its own has written its first row."""
    end = time.monotonic() + seconds
    while not any(map(_has_row, os.walk(save_dir))):  # a glob would fail at a folder that goes meanwhile
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.02)


def _has_row(level: tuple[str, list[str], list[str]]) -> bool:
    folder, _, names = level
    paths = [Path(folder, name) for name in names if name.endswith(".json")]
    return Path(folder).name != "meta" and any(path.stat().st_size for path in paths)
