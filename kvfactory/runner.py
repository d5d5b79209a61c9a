"""The loop: one model load, then every method and budget over every dataset, each example one row."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvfactory.example import run_example
from kvfactory.generation import generate
from kvfactory.loading import hardware, load_model
from kvfactory.monkeypatch import Attachment, attach, attach_plan, detach
from kvfactory.preparation import DatasetPart, Job, PlannedRun
from kvfactory.reports.environment import collect_environment
from kvfactory.reports.progress import Progress
from kvfactory.reports.records import ResultFile
from kvfactory.reports.run import Run
from kvfactory.reports.run_record import load_record
from kvfactory.reports.shards import merge_shards
from kvfactory.reports.stop import STOPPED, StopSignal

WARM_UP_TOKENS = 64


class Notices:
    """Sentences for the user on standard error, each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            print(f"note: {sentence}", file=sys.stderr, flush=True)


def execute(job: Job, stop: StopSignal) -> int:
    """Runs a job.

    Returns:
        Exit code: 0 every example has a result, 1 some failed (each is recorded), 75 stopped in between.

    Raises:
        ValueError: files in use, or made with other settings; weights that do not load. Nothing is written then.
        OSError: the disk is full or gone.
    """
    tell = Notices()
    for planned in job.runs:
        for note in planned.notes:
            tell(note)
    pending = [planned for planned in job.runs if not _finished(job, planned, tell)]
    model, code = None, 0
    for planned in pending:
        with Run(planned.paths, job.orders, job.settings.overwrite) as run:
            run.check(planned.settings, planned.facts)
            if model is None:
                model = _ready_model(job)
            if stop.requested:
                return STOPPED
            attachment = attach_plan(model, planned.plan, job.computation.attn_implementation)
            try:
                run.exit_code = _run_plan(job, planned, run, attachment, stop, tell)
            finally:
                detach(model)
        if run.exit_code == STOPPED:
            return STOPPED
        code = max(code, run.exit_code)
        if code and job.settings.fail_fast:
            break
    return code


def merge(job: Job) -> int:
    """Joins the shards of every run of a job; ValueError when one is missing, unfinished or still running."""
    for planned in job.runs:
        for path in merge_shards(planned.paths, job.whole_orders):
            print(f"merged: {path}")
    return 0


def _finished(job: Job, planned: PlannedRun, tell: Callable[[str], None]) -> bool:
    """Whether all results are there; refuses files in use or made otherwise."""
    with Run(planned.paths, job.orders, job.settings.overwrite) as run:
        run.check(planned.settings, planned.facts)
        for notice in run.notices:
            tell(notice)
        run.exit_code = 0
        return run.complete


def _ready_model(job: Job) -> PreTrainedModel:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job.settings.seed)
    model = load_model(job.checkpoint, job.computation)
    if job.computation.device == "cuda":  # first calls compile and allocate; no example should pay for that
        attach(model, "fullkv", attn_implementation=job.computation.attn_implementation)
        try:
            generate(model, torch.ones(WARM_UP_TOKENS, dtype=torch.long), 2, eos_token_id=[])
        finally:
            detach(model)
    return model


def _run_plan(
    job: Job, planned: PlannedRun, run: Run, attachment: Attachment, stop: StopSignal, tell: Callable[[str], None]
) -> int:
    """One method and budget over all datasets -> exit code."""
    run.start(planned.settings, collect_environment(hardware(job.computation.device)), planned.facts)

    def note(sentence: str) -> None:
        tell(sentence)
        run.record.note(sentence)

    for sentence in planned.notes:
        run.record.note(sentence)
    for name, results in run.results.items():
        began = time.perf_counter()
        try:
            going = _run_dataset(job, planned, job.parts[name], results, attachment, stop, note)
        finally:
            run.record.update(name, **_counts(results, planned, name, time.perf_counter() - began))
        results.close()
        if not going:
            break
    if stop.requested and not run.complete:
        return STOPPED
    return 1 if run.failed else 0


def _counts(results: ResultFile, planned: PlannedRun, name: str, seconds: float) -> dict[str, int | float]:
    rows = results.rows()
    done = [row for row in rows if row.get("error") is None]
    before = ((load_record(planned.paths.meta) or {}).get("counts") or {}).get(name, {})
    return {
        "done": len(done),
        "failed": len(rows) - len(done),
        "truncated": sum(row["truncated"] for row in done),
        "empty": sum(not row["pred"].strip() for row in done),
        "wall_s": round(before.get("wall_s", 0.0) + seconds, 3),
    }


def _run_dataset(
    job: Job,
    planned: PlannedRun,
    part: DatasetPart,
    results: ResultFile,
    attachment: Attachment,
    stop: StopSignal,
    note: Callable[[str], None],
) -> bool:
    """Every example that has no result yet; False when the run is to end here."""
    before = [row["score"] for row in results.rows() if row.get("error") is None]
    title = f"{planned.paths.label} {planned.plan.budget.tag} {part.name}"
    progress = None if job.settings.quiet else Progress(title, len(part.share), before)
    try:
        for record in part.share:
            if record["_id"] in results.done:
                continue
            if stop.requested:
                return False
            row = _example_or_error(job, attachment, part, record, note)
            results.append(row)
            if progress is not None:
                progress.step(row.get("score"))
            if "error" not in row:
                _note_large_cache(planned, row, note)
            elif job.settings.fail_fast:
                return False
    finally:
        if progress is not None:
            progress.close()
    return True


def _example_or_error(
    job: Job, attachment: Attachment, part: DatasetPart, record: dict, note: Callable[[str], None]
) -> dict[str, Any]:
    """The example's row, or the row that says why it has none: one bad example does not end a sweep."""
    try:
        return run_example(job, attachment, part, record, note)
    except Exception as error:  # recorded, counted, and the exit code says so; KeyboardInterrupt passes
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"failed: {part.name}/{record['_id']}: {text}", file=sys.stderr, flush=True)
        return {"_id": record["_id"], "dataset": record["dataset"], "error": text}


def _note_large_cache(planned: PlannedRun, row: dict[str, Any], note: Callable[[str], None]) -> None:
    """Says once that a method holds more than FullKV would."""
    held = row["bytes_end"] + row["bytes_aux"]
    if held > row["bytes_full"] and planned.plan.uses_budget:
        note(
            f"{planned.plan.method} at --kv_cache_granularity {planned.plan.granularity} and budget "
            f"{planned.plan.budget.tag} holds a larger cache than FullKV would on some prompts (see bytes_end and "
            "bytes_full)"
        )
