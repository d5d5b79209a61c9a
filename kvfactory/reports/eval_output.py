"""results.md, results.csv and results.json of one `EvalTable`: an empty cell, and null in JSON, for what is missing."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from kvfactory.data.tasks import LENGTH_BUCKETS
from kvfactory.reports.eval_cells import COSTS, Cell, count_examples, mean_costs, mean_extra
from kvfactory.reports.eval_tables import EvalTable, MethodRow
from kvfactory.reports.files import FileLock, json_bytes, write_atomically
from kvfactory.reports.tables import format_bytes, format_number, format_table
from kvfactory.version import __version__

_BUCKETS = tuple(bucket for bucket, _, _ in LENGTH_BUCKETS)


def write_results(table: EvalTable, folder: Path) -> None:
    """Write the three files into `folder`; each replaces the old one whole or not at all.

    Raises:
        OSError, ValueError: `folder` cannot be written to.
    """
    write_reports(folder, to_csv(table), to_markdown(table), to_dict(table))


def write_reports(folder: Path, csv_text: str, markdown: str, data: dict[str, Any]) -> None:
    """`write_results` for ready contents."""
    contents = {
        "results.csv": csv_text.encode("utf-8"),
        "results.md": (markdown + "\n").encode("utf-8"),
        "results.json": json_bytes(data, indent=2) + b"\n",
    }
    for name, data in contents.items():
        with FileLock(folder / name, wait=True):  # two evaluations at once share the temp name
            write_atomically(folder / name, data)


def to_markdown(table: EvalTable, width: int | None = None) -> str:
    """Captions, scores, costs, LongBench-E buckets, further metrics and notes.

    Args:
        width: break the tables into blocks of columns that fit this many terminal columns; None never breaks.
    """
    parts = [f"## {table.name}", "\n".join(f"- {line}" for line in table.captions()), *blocks(*_scores(table), width)]
    parts += ["Standard errors (percent)", *blocks(*_errors(table), width)]
    parts += ["Counts and costs (means per example; bytes at the end of the answer)", *blocks(*_costs(table), width)]
    if table.uniform:
        parts += ["LongBench-E by length", *blocks(*_bucket_rows(table), width)]
    further = _extra_rows(table)
    if further[1]:
        parts += ["Further metrics (not LongBench's)", *blocks(*further, width)]
    parts.append("\n".join(f"- note: {note}" for note in table.notes))
    return "\n\n".join(part for part in parts if part)


def _head(table: EvalTable) -> list[str]:
    return ["run", "method"] if table.several_runs else ["method"]


def _names(table: EvalTable, row: MethodRow) -> list[str]:
    return [row.run, row.shown] if table.several_runs else [row.shown]


def score_text(cell: Cell | None) -> str:
    """A table's cell: the score, with `(n<N)` where examples are missing; "" without a file."""
    if cell is None:
        return ""
    return " ".join(part for part in (format_number(cell.score), cell.mark and f"({cell.mark})") if part)


def _scores(table: EvalTable) -> tuple[list[str], list[list[str]], int]:
    """Headers, rows and the number of leading columns that every block repeats."""
    # A mean over one dataset repeats that dataset's column; the CSV and the JSON have it all the same.
    categories = {c: members for c, members in table.categories.items() if len(members) > 1}
    averages = [a for a in table.averages() if len(a.datasets) > 1]
    rows = []
    for row in table.rows:
        means = [(row.mean_over(members), members) for members in categories.values()]
        means += [(average.of(row), average.datasets) for average in averages]
        texts = [format_number(v) + ("*" if v is not None and row.marked(members) else "") for v, members in means]
        rows.append([*_names(table, row), *(score_text(row.cells.get(d)) for d in table.datasets), *texts])
    headers = [*_head(table), *table.datasets, *categories, *(average.name for average in averages)]
    return headers, rows, len(_head(table))


def _errors(table: EvalTable) -> tuple[list[str], list[list[str]], int]:
    rows = []
    for row in table.rows:
        cells = [row.cells.get(d) for d in table.datasets]
        rows.append([*_names(table, row), *(format_number(cell and cell.stderr) for cell in cells)])
    return [*_head(table), *table.datasets], rows, len(_head(table))


def _costs(table: EvalTable) -> tuple[list[str], list[list[Any]], int]:
    rows = []
    for row in table.rows:
        counts, costs = count_examples(row.cells.values()), mean_costs(row.examples)
        sizes = [format_bytes(costs["bytes_end"]), format_number(costs["ratio"], 3)]
        sizes += [format_number(costs["kept_tokens"], 1), format_number(costs["seconds"])]
        rows.append([*_names(table, row), *counts.values(), *sizes])
    headers = ["n", "n_empty", "n_error", "n_truncated", "bytes", "bytes/FullKV", "kept tokens", "seconds"]
    return [*_head(table), *headers], rows, len(_head(table))


def _bucket_rows(table: EvalTable) -> tuple[list[str], list[list[Any]], int]:
    rows = []
    for row in table.rows:
        for dataset in (d for d in table.uniform if d in row.cells):
            cell = row.cells[dataset]
            values = [*(cell.buckets[b] for b in _BUCKETS), cell.bucket_mean]
            texts = [*map(format_number, values), score_text(cell), format_number(cell.stderr)]
            rows.append([*_names(table, row), dataset, *texts, cell.n])
    headers = [*_head(table), "dataset", *_BUCKETS, "mean of buckets", "plain mean", "stderr", "n"]
    return headers, rows, len(_head(table)) + 1


def _extra_rows(table: EvalTable) -> tuple[list[str], list[list[Any]], int]:
    rows = []
    for row in table.rows:
        for dataset, cell in row.cells.items():
            for name, value in mean_extra(cell.examples).items():
                rows.append([*_names(table, row), dataset, name, format_number(value)])
    return [*_head(table), "dataset", "metric", "value"], rows, len(_head(table)) + 2


def blocks(headers: list[str], rows: list[list[Any]], fixed: int, width: int | None) -> list[str]:
    """The table as one text, or as several that fit `width`, each with the first `fixed` columns."""
    whole = format_table(headers, rows)
    if width is None or len(whole.split("\n", 1)[0]) <= width:
        return [whole]
    blocks, start = [], fixed
    while start < len(headers):
        stop = start + 1
        text = _columns(headers, rows, fixed, start, stop)
        while stop < len(headers):
            wider = _columns(headers, rows, fixed, start, stop + 1)
            if len(wider.split("\n", 1)[0]) > width:
                break
            text, stop = wider, stop + 1
        blocks.append(text)
        start = stop
    return blocks


def _columns(headers: list[str], rows: list[list[Any]], fixed: int, start: int, stop: int) -> str:
    return format_table(
        headers[:fixed] + headers[start:stop], [list(row[:fixed]) + list(row[start:stop]) for row in rows]
    )


def to_csv(table: EvalTable) -> str:
    """One row a method, one number a cell: LongBench-E buckets and standard errors have columns of their own."""
    averages = table.averages()
    headers = [*_head(table), "granularity", *table.datasets, *table.categories, *(a.key for a in averages)]
    headers += ["n", "n_empty", "n_error", "n_truncated", "n_missing", *COSTS, "incomplete"]
    for dataset in table.datasets:
        headers += [f"{dataset}_stderr", f"{dataset}_n"]
    for dataset in table.uniform:
        headers += [f"{dataset}_{bucket}" for bucket in (*_BUCKETS, "bucket_mean")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    for row in table.rows:
        cells = [row.cells.get(d) for d in table.datasets]
        line: list[Any] = [row.run, row.label] if table.several_runs else [row.label]
        line += [row.granularity, *(cell and cell.score for cell in cells)]
        line += [row.mean_over(members) for members in table.categories.values()]
        line += [average.of(row) for average in averages]
        line += [*count_examples(row.cells.values()).values(), cells.count(None)]
        line += mean_costs(row.examples).values()
        line.append(" ".join(f"{d}:{c.mark}" for d, c in row.cells.items() if c.mark))
        for cell in cells:
            line += [cell and cell.stderr, cell and cell.n]
        for cell in (row.cells.get(d) for d in table.uniform):
            line += [*(cell and cell.buckets[b] for b in _BUCKETS), cell and cell.bucket_mean]
        writer.writerow(line)  # csv writes None as an empty cell
    return text.getvalue()


def to_dict(table: EvalTable) -> dict[str, Any]:
    """Everything, unrounded means included; what is missing is None."""
    averages = table.averages()
    rows = []
    for row in table.rows:
        entry = {"run": row.run, "method": row.label, "granularity": row.granularity or None, **row.facts}
        entry["datasets"] = {d: row.cells[d].as_dict() if d in row.cells else None for d in table.datasets}
        entry["categories"] = {c: row.mean_over(members) for c, members in table.categories.items()}
        entry["averages"] = {average.name: average.of(row) for average in averages}
        entry |= count_examples(row.cells.values()) | mean_costs(row.examples)
        rows.append(entry)
    return {
        "kvfactory": __version__,
        "name": table.name,
        "captions": table.captions(),
        "datasets": table.datasets,
        "categories": {c: list(members) for c, members in table.categories.items()},
        "averages": {average.name: list(average.datasets) for average in averages},
        "rows": rows,
        "notes": table.notes,
    }
