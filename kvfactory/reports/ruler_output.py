"""results.md, results.csv and results.json of one `RulerTable`; what is missing is an empty cell, null in JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvfactory.reports.eval_cells import COSTS, count_examples, mean_costs
from kvfactory.reports.eval_output import blocks, score_text
from kvfactory.reports.ruler_tables import LengthRow, RulerTable
from kvfactory.reports.tables import format_number
from kvfactory.version import __version__


def to_markdown(table: RulerTable, width: int | None = None) -> str:
    """Captions, scores by task, averages by length, and notes.

    Args:
        width: break the tables into blocks of columns that fit this many terminal columns; None never breaks.
    """
    parts = [f"## {table.name}", "\n".join(f"- {line}" for line in table.captions())]
    parts += blocks(*_scores(table), width)
    parts += [f"{table.average_name} by length", *blocks(*_averages(table), width)]
    parts.append("\n".join(f"- note: {note}" for note in table.notes))
    return "\n\n".join(part for part in parts if part)


def _head(table: RulerTable) -> list[str]:
    return ["run", "method"] if table.several_runs else ["method"]


def _names(table: RulerTable, row: LengthRow) -> list[str]:
    return [row.run, row.shown] if table.several_runs else [row.shown]


def _average_text(table: RulerTable, row: LengthRow | None) -> str:
    average = row and table.average(row)
    return "" if average is None else format_number(average) + "*" * row.marked(table.tasks)


def _scores(table: RulerTable) -> tuple[list[str], list[list[Any]], int]:
    """Headers, rows and the number of leading columns that every block repeats."""
    rows = []
    for row in table.rows:
        scores = [score_text(row.cells.get(task)) for task in table.tasks]
        ends = [_average_text(table, row), format_number(table.average_error(row)), len(row.examples)]
        ends.append(format_number(mean_costs(row.examples)["ratio"], 3))
        rows.append([*_names(table, row), row.length, *scores, *ends])
    headers = [*_head(table), "length", *table.tasks, table.average_name, "stderr", "n", "bytes/FullKV"]
    return headers, rows, len(_head(table)) + 1


def _averages(table: RulerTable) -> tuple[list[str], list[list[Any]], int]:
    rows = []
    for named, at in table.by_length():
        rows.append([*_names(table, named), *(_average_text(table, at.get(length)) for length in table.lengths)])
    return [*_head(table), *map(str, table.lengths)], rows, len(_head(table))


def to_csv(table: RulerTable) -> str:
    """One row a method and length, one number a cell."""
    headers = [*_head(table), "granularity", "length", *table.tasks, "average", "average_stderr"]
    headers += ["n", "n_empty", "n_error", "n_truncated", "n_missing", *COSTS, "incomplete"]
    headers += [f"{task}_{value}" for task in table.tasks for value in ("stderr", "n")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    for row in table.rows:
        cells = [row.cells.get(task) for task in table.tasks]
        line: list[Any] = [row.run, row.label] if table.several_runs else [row.label]
        line += [row.granularity, row.length, *(cell and cell.score for cell in cells)]
        line += [table.average(row), table.average_error(row)]
        line += [*count_examples(row.cells.values()).values(), cells.count(None), *mean_costs(row.examples).values()]
        line.append(" ".join(f"{task}:{cell.mark}" for task, cell in row.cells.items() if cell.mark))
        for cell in cells:
            line += [cell and cell.stderr, cell and cell.n]
        writer.writerow(line)  # csv writes None as an empty cell
    return text.getvalue()


def to_dict(table: RulerTable) -> dict[str, Any]:
    """Everything, unrounded means included; what is missing is None."""
    rows = []
    for row in table.rows:
        entry = {"run": row.run, "method": row.label, "granularity": row.granularity or None, **row.facts}
        entry["length"] = row.length
        entry["tasks"] = {task: row.cells[task].as_dict() if task in row.cells else None for task in table.tasks}
        entry |= {"average": table.average(row), "average_stderr": table.average_error(row)}
        rows.append(entry | count_examples(row.cells.values()) | mean_costs(row.examples))
    averages = []
    for named, at in table.by_length():
        values = {str(length): table.average(at[length]) if length in at else None for length in table.lengths}
        averages.append({"run": named.run, "method": named.label, "average": values})
    return {
        "kvfactory": __version__,
        "name": table.name,
        "captions": table.captions(),
        "tasks": list(table.tasks),
        "lengths": table.lengths,
        "rows": rows,
        "averages_by_length": averages,
        "notes": table.notes,
    }
