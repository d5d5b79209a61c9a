"""The table that a run ends with: every method and budget of the call, scored again from its files."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Any

from kvfactory.preparation import Job, PlannedRun
from kvfactory.reports.eval_cells import dataset_score
from kvfactory.reports.run_record import load_record, mixture
from kvfactory.reports.tables import format_bytes, format_number, format_table, summarise_rows

HEADERS = (
    "method",
    "granularity",
    "budget",
    "datasets",
    "n",
    "score",
    "kept tokens",
    "bytes",
    "bytes/FullKV",
    "s/example",
)


def summary(job: Job) -> str:
    """Table, what it averages over, and the command that recomputes the scores.

    Scores are means over the datasets named below the table, as eval.py makes them; kept tokens, bytes and seconds are
    means over examples.
    """
    lines = [format_table(HEADERS, [_row(job, planned) for planned in job.runs])]
    lines.append(
        f"score: mean over {len(job.parts)} dataset(s): {', '.join(job.parts)}; in percent, {job.suite.metric}"
    )
    if any(not planned.settings["granularity_has_effect"] for planned in job.runs):
        lines.append("granularity -: the method keeps the same tokens for all heads and stores them per kv_head")
    for planned in job.runs:
        if sentence := mixture(load_record(planned.paths.meta)):
            lines.append(f"{planned.paths.label} at budget {planned.plan.budget.tag}: {sentence}")
    folders = dict.fromkeys(planned.paths.folder for planned in job.runs)
    root = next(iter(folders)) if len(folders) == 1 else job.runs[0].paths.save_dir
    again = f"python {shlex.join(job.suite.rescore(root))}"
    if job.settings.shard is not None and any(p.paths.results(name).exists() for p in job.runs for name in job.parts):
        lines.append(f"when all shards are done: the same call with --merge_shards instead of --shard_id, then {again}")
    else:  # one call for all, or a shard for which an earlier undivided run left nothing to do
        lines.append(f"score again: {again}")
    return "\n".join(lines)


def _row(job: Job, planned: PlannedRun) -> list[Any]:
    cells = []
    for name, part in job.parts.items():
        path = planned.paths.results(name)
        if path.is_file() and path.stat().st_size:
            cells.append(summarise_rows(path, name, partial(job.suite.score_again, part.dataset)))
    planned_count = sum(len(part.share) for part in job.parts.values())
    done = sum(cell["n"] for cell in cells)
    scores = [_score(cell, job.settings.errors_as_zero) for cell in cells]
    known = [dataset_score(score) for score in scores if score is not None]
    whole = len(known) == len(job.parts)  # a mean over some of the datasets would look like the mean over all
    granularity = planned.plan.granularity if planned.settings["granularity_has_effect"] else "-"
    return [
        planned.paths.label,
        granularity,
        planned.plan.budget.tag if planned.plan.uses_budget else "-",
        f"{len(known)} of {len(job.parts)}" if not whole else len(known),
        done if done == planned_count else f"{done} of {planned_count}",
        format_number(sum(known) / len(known)) if whole and known else None,
        format_number(_mean(cells, "kept"), 1),
        format_bytes(_mean(cells, "bytes_end")),
        format_number(_ratio(cells), 3),
        format_number(_mean(cells, "seconds")),
    ]


def _score(cell: dict[str, Any], errors_as_zero: bool) -> float | None:
    if cell["score"] is None or not errors_as_zero:
        return cell["score"]
    return cell["score"] * cell["n"] / (cell["n"] + cell["n_error"])


def _mean(cells: list[dict[str, Any]], name: str) -> float | None:
    """Mean over examples of a figure that each cell gives as a mean over its examples."""
    known = [(cell[name], cell["n"]) for cell in cells if cell[name] is not None]
    return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None


def _ratio(cells: list[dict[str, Any]]) -> float | None:
    """Total bytes at the end over FullKV's total."""
    end, full = (_mean(cells, name) for name in ("bytes_end", "bytes_full"))
    return end / full if end is not None and full else None
