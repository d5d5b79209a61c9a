"""The heat map of a needle run, lengths times depths, as a picture and as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvfactory.needle.scores import SCORE_MAX
from kvfactory.reports.files import write_atomically

COLOURS = ("#F0496E", "#EBB839", "#0CD79F")  # low to high, those of KVCache-Factory's visualize.py
DPI = 150
SIZE = (12.0, 5.0)  # inches
MAX_TICKS = 24


def write_heat_map(
    rows: Sequence[Mapping[str, Any]],
    path_png: Path,
    path_csv: Path,
    title: str,
    trained_length: int | None = None,
    value: str = "recall",
) -> float:
    """Draws one score over the grid and writes its table; returns the mean over all rows that have a score.

    A cell is the mean over its rows (several needles). Cells without a scored row stay blank in both files. The table
    has one line per depth and one column per length.

    Args:
        rows: result rows; `context_length`, `depth_percent` and `scores` are read; of a row with an `error`
            only its place, if it has one.
        trained_length: tokens the model was trained on; a dashed line stands between the lengths up to it and those
            beyond, where there are both.
        value: which score, one of `kvfactory.needle.scores.SCORES`; colours span 0 to the most it can be.

    Raises:
        ValueError: no row has a score.
    """
    scored: dict[tuple[int, int], list[float]] = {}
    places = set()
    for row in rows:
        place = (row.get("depth_percent"), row.get("context_length"))
        if None not in place:
            places.add(place)
        if row.get("error") is None:
            scored.setdefault(place, []).append(float(row["scores"][value]))
    if not scored:
        raise ValueError(f"no result to draw for {title}: none of {len(rows)} rows has a score")
    depths, lengths = sorted({depth for depth, _ in places}), sorted({length for _, length in places})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for (depth, length), values in scored.items():
        grid[depths.index(depth), lengths.index(length)] = np.mean(values)
    write_atomically(path_csv, _table(grid, depths, lengths))
    write_atomically(path_png, _picture(grid, depths, lengths, title, trained_length, value))
    return float(np.mean([x for values in scored.values() for x in values]))


def _table(grid: np.ndarray, depths: list[int], lengths: list[int]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["depth_percent", *lengths])
    for depth, line in zip(depths, grid, strict=True):
        writer.writerow([depth, *("" if np.isnan(x) else f"{x:.6g}" for x in line)])
    return out.getvalue().encode()


def _picture(
    grid: np.ndarray, depths: list[int], lengths: list[int], title: str, trained_length: int | None, value: str
) -> bytes:
    """PNG. Made without pyplot, whose backend and open figures belong to the caller's process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("needle", COLOURS)  # nan is transparent
    image = axes.imshow(grid, cmap=colours, vmin=0, vmax=SCORE_MAX[value], aspect="auto", interpolation="nearest")
    for axis, labels in ((axes.xaxis, lengths), (axes.yaxis, depths)):
        ticks = range(0, len(labels), -(-len(labels) // MAX_TICKS))
        axis.set_ticks(ticks, [str(labels[i]) for i in ticks])
    axes.tick_params(axis="x", labelrotation=45)
    within = sum(length <= (trained_length or 0) for length in lengths)
    if 0 < within < len(lengths):
        axes.axvline(within - 0.5, color="white", linestyle="--", linewidth=2)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="context length (tokens)", ylabel="depth (percent)")
    figure.colorbar(image, ax=axes, label=value)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()
