"""Aligned markdown tables, and the one-line summary of a result file that the demo's table is made of."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvfactory.reports.eval_cells import mean_costs, score_rows
from kvfactory.reports.eval_files import canonical_label, read_rows


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], align: str | None = None) -> str:
    """A markdown table whose columns line up in a terminal too.

    Args:
        headers: one text per column.
        rows: cells; None is an empty cell, everything else is shown as `str` gives it.
        align: one of "l", "r", "c" per column; by default columns of numbers are right-aligned, others left.

    Returns:
        The table's lines, joined by newlines, without a newline at the end.

    Raises:
        ValueError: a row or `align` has another number of columns than `headers`.
    """
    table = [[_cell(value) for value in row] for row in (headers, *rows)]
    for i, row in enumerate(table):
        if len(row) != len(table[0]):
            raise ValueError(f"row {i} of the table has {len(row)} cells, the header has {len(table[0])}.")
    columns = list(zip(*table, strict=True))
    if align is None:
        align = "".join("r" if _numeric(column[1:]) else "l" for column in columns)
    if len(align) != len(columns) or set(align) - set("lrc"):
        raise ValueError(f"align {align!r} must hold one of l, r, c for each of the {len(columns)} columns.")
    widths = [max(3, *map(_width, column)) for column in columns]
    rule = [_rule(side, width) for side, width in zip(align, widths, strict=True)]
    lines = [[_pad(c, w, a) for c, w, a in zip(row, widths, align, strict=True)] for row in table]
    lines.insert(1, rule)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_number(value: float | None, digits: int = 2) -> str:
    """`value` with a fixed number of decimals; "" for None."""
    return "" if value is None else f"{value:.{digits}f}"


def format_bytes(value: float | None) -> str:
    """Bytes with a binary unit and one decimal, e.g. "12.3 MiB"; "" for None."""
    if value is None:
        return ""
    if abs(value) < 1024:
        return f"{value:.0f} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    value /= 1024
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def summarise_rows(path: Path, dataset: str, score: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """One result file in numbers, scored again from its rows.

    Args:
        dataset: what its rows call it.
        score: of a finished row, in [0, 1].

    Returns:
        `method` (file label), `dataset`, `n`, `n_error`, `score` (mean, percent, unrounded), `stderr` (percent), `kept`
        (mean kept tokens per stored head), `bytes_end`, `bytes_full` (means), `ratio` (their totals' ratio), `seconds`
        (mean prefill plus decode per example). None where the file does not say or has no scored rows.

    Raises:
        ValueError: the file is missing or broken, or holds a row that cannot be scored.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a result file.")
    cell = score_rows(read_rows(path), path, dataset, lambda row: (score(row), {}))
    costs = mean_costs(cell.examples)
    return {
        "method": canonical_label(path.name.removesuffix(".json")),
        "dataset": dataset,
        "n": cell.n,
        "n_error": cell.n_error,
        "score": cell.mean,
        "stderr": cell.stderr,
        "kept": costs["kept_tokens"],
        "bytes_end": costs["bytes_end"],
        "bytes_full": costs["bytes_full"],
        "ratio": costs["ratio"],
        "seconds": costs["seconds"],
    }


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _numeric(cells: Sequence[str]) -> bool:
    """Whether every filled cell begins with a number (a unit or a mark may follow) and one is filled."""
    filled = [cell for cell in cells if cell]
    return bool(filled) and all(cell.lstrip("+-")[:1].isdigit() for cell in filled)


def _width(text: str) -> int:
    """Terminal columns: two for East Asian wide characters, none for combining ones."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, side: str) -> str:
    missing = width - _width(text)
    left = {"l": 0, "r": missing, "c": missing // 2}[side]
    return " " * left + text + " " * (missing - left)


def _rule(side: str, width: int) -> str:
    return {"l": "-" * width, "r": "-" * (width - 1) + ":", "c": ":" + "-" * (width - 2) + ":"}[side]
