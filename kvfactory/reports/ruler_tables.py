"""RULER result files brought together: a row for each method and length, a column for each task.

An average is over all tasks of the table and stays empty for a row that misses one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfactory.reports.eval_cells import Cell, score_rows
from kvfactory.reports.eval_files import RunFolder, planned_examples, read_rows, record_value
from kvfactory.reports.eval_tables import (
    MethodRow,
    fact_captions,
    mark_captions,
    origin_captions,
    recorded_notes,
    stored_granularity,
)
from kvfactory.reports.ruler_files import read_ruler_lines
from kvfactory.ruler.metrics import ruler_score
from kvfactory.ruler.read import is_length
from kvfactory.ruler.tasks import RULER_TASKS

_CAPTION_KEYS = {"preset": ("preset",), "protocol": ("ruler_protocol", "protocol")}


@dataclass
class LengthRow(MethodRow):
    """One method under one budget at one prompt length in tokens; `cells` is {task: cell}."""

    length: int


@dataclass
class RulerTable:
    """Everything the written reports show of some run folders."""

    name: str
    rows: list[LengthRow]
    notes: list[str] = field(default_factory=list)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those of any row, in RULER's order."""
        return tuple(task for task in RULER_TASKS if any(task in row.cells for row in self.rows))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.rows})

    @property
    def several_runs(self) -> bool:
        return len({row.run for row in self.rows}) > 1

    @property
    def average_name(self) -> str:
        return "avg 13" if len(self.tasks) == len(RULER_TASKS) else f"avg of {len(self.tasks)}"

    def average(self, row: LengthRow) -> float | None:
        """Mean of the task scores, two decimals; None if the row misses a task."""
        return row.mean_over(self.tasks)

    def average_error(self, row: LengthRow) -> float | None:
        """Standard error of the average, the tasks' examples being independent; None if a task's is not known."""
        errors = [row.cells[task].stderr if task in row.cells else None for task in self.tasks]
        return None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors)

    def by_length(self) -> list[tuple[LengthRow, dict[int, LengthRow]]]:
        """For every run and method its first row, which names it, and its row at each length."""
        methods: dict[tuple[str, str], dict[int, LengthRow]] = {}
        for row in self.rows:
            methods.setdefault((row.run, row.label), {})[row.length] = row
        return [(next(iter(rows.values())), rows) for rows in methods.values()]

    def captions(self) -> list[str]:
        """What a reader must know before comparing numbers, one line each."""
        lines = ["score: percent of the references found; in the qa tasks, of the examples with any reference found"]
        lines += [*fact_captions(self.rows), *origin_captions(self.rows), *mark_captions(self.rows)]
        if len(self.tasks) < len(RULER_TASKS):
            lines.append(f"{self.average_name}: {', '.join(self.tasks)}.")
        return lines


def score_ruler_run(run: RunFolder, errors_as_zero: bool = False) -> RulerTable:
    """Score every file of a run folder again, from predictions and references alone.

    Raises:
        ValueError: a file cannot be read or scored.
    """
    name = run_name = run.name
    if is_length(name):  # one length's folder
        run_name = run.path.resolve().parent.name
        name = f"{run_name}/{name}"
    rows, notes = [], list(run.notes)
    for label, files in run.files.items():
        record = run.records.get(label)
        by_length: dict[int, dict[str, Cell]] = {}
        for key in sorted(files, key=_order):
            length, task = key.split("/")
            cell = _score_file(files[key], task, planned_examples(record, key), errors_as_zero)
            notes += [f"{length}/{note}" for note in cell.notes]
            by_length.setdefault(int(length), {})[task] = cell
        notes += recorded_notes(label, record)
        facts = {fact: record_value(record, *keys) for fact, keys in _CAPTION_KEYS.items()}
        for length, cells in by_length.items():
            granularity = stored_granularity(label, record, cells)
            rows.append(LengthRow(run_name, label, cells, granularity, facts, length))
    return RulerTable(name, rows, notes)


def _order(key: str) -> tuple[int, int]:
    length, task = key.split("/")
    return int(length), list(RULER_TASKS).index(task)


def _score_file(path: Path, task: str, planned: int | None, errors_as_zero: bool) -> Cell:
    def scores(row: dict[str, Any]) -> tuple[float, dict[str, float]]:
        return ruler_score(task, row["pred"], row["answers"]), {}

    return score_rows(read_rows(path, read_ruler_lines), path, task, scores, planned, errors_as_zero)
