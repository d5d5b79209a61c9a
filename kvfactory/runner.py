"""The loop: one model load, then every method and budget over every dataset, each example one row."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvfactory.example import Example, example_row, peaks_by_device, reset_peak
from kvfactory.generation import generate, generate_rows
from kvfactory.loading import hardware, load_model
from kvfactory.lookahead import ahead
from kvfactory.monkeypatch import Attachment, attach, attach_plan, detach
from kvfactory.preparation import DatasetPart, Job, PlannedRun
from kvfactory.reports.environment import collect_environment
from kvfactory.reports.progress import Progress
from kvfactory.reports.records import ResultFile
from kvfactory.reports.run import Run
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import PEAK, RunRecord, load_record
from kvfactory.reports.shards import is_complete, merge_shards
from kvfactory.reports.stop import STOPPED, StopSignal
from kvfactory.rows import Request, RowOutput
from kvfactory.verify_decode import check_against_loop

WARM_UP_TOKENS = 64
COUNTED_FIELDS = ("pred", "score", "truncated", "near_ties", "bytes_end")


class Notices:
    """Sentences for the user on standard error, each once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            print(f"note: {sentence}", file=sys.stderr, flush=True)


def execute(job: Job, stop: StopSignal) -> int:
    """Runs a job: every method and budget of the call goes through the data together, one model load for all.

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
    pending = [planned for planned in job.runs if not is_finished(job, planned, tell)]
    if not pending:
        return 0
    with ExitStack() as stack:
        active = [ActiveRun(planned, stack.enter_context(_files(job, planned)), tell) for planned in pending]
        for run in active:
            if changed := run.files.check(run.planned.settings, run.planned.facts):
                tell(
                    f"--resume force goes on with {run.planned.paths.meta}, made with other settings or data "
                    f"({'; '.join(changed)}): the run record keeps which results those are"
                )
        model = _ready_model(job)
        if stop.requested:
            return STOPPED
        attachment = attach_plan(model, pending[0].plan, job.computation.attn_implementation, job.computation.fuse)
        try:
            for planned in pending:
                attachment.clusters(planned.plan)  # what does not fit the model is refused before a row is written
            environment = collect_environment(hardware(job.computation.device, job.computation.device_map))
            for run in active:
                run.start(environment)
            Sweep(job, active, attachment, stop).run()
        finally:
            detach(model)
        for run in active:  # after an error the records say none
            run.files.exit_code = run.outcome(stop)
        return max(run.files.exit_code for run in active)


def merge(job: Job, runs: Sequence[PlannedRun] | None = None, num_shards: int | None = None) -> int:
    """Joins the shards of `runs`, by default all of the job; ValueError when one is missing, unfinished or running."""
    for planned in job.runs if runs is None else runs:
        count, force = num_shards or job.settings.num_shards, job.settings.resume == "force"
        for path in merge_shards(planned.paths, job.whole_orders, count, force):
            print(f"merged: {path}")
    return 0


def is_finished(job: Job, planned: PlannedRun, tell: Callable[[str], None]) -> bool:
    """Whether all results are there; refuses files in use or made otherwise."""
    if planned.paths.shard is not None and not job.settings.overwrite:
        whole = planned.paths.for_shard(None)
        if is_complete(whole, job.whole_orders):
            changed = RunRecord(whole).check(planned.settings, planned.facts, force=job.settings.resume == "force")
            _tell_made_otherwise(whole, changed, tell)
            tell(f"{whole.label}: the undivided run's files are complete already, nothing is left to do for this shard")
            return True
    with _files(job, planned) as run:
        changed = run.check(planned.settings, planned.facts)
        for notice in run.notices:
            tell(notice)
        for results in run.results.values():
            _check_fields(results, (*COUNTED_FIELDS, *job.suite.row_fields))
        run.exit_code = 0
        if run.complete:
            _tell_made_otherwise(planned.paths, changed, tell)
        return run.complete


def _files(job: Job, planned: PlannedRun) -> Run:
    settings = job.settings
    return Run(planned.paths, job.orders, settings.overwrite, force=settings.resume == "force")


def _tell_made_otherwise(paths: RunPaths, changed: list[str], tell: Callable[[str], None]) -> None:
    """Says that finished results stay what they are, whatever --resume force lets through."""
    if changed:
        tell(f"{paths.meta}: nothing is left to do, all results are there with other settings ({'; '.join(changed)})")


def _check_fields(results: ResultFile, names: tuple[str, ...]) -> None:
    """Refuses a finished row that lacks what is counted and scored."""
    for row in results.rows():
        missing = [name for name in names if name not in row]
        if missing and row.get("error") is None:
            raise ValueError(
                f"{results.path}: the row with _id {row['_id']!r} has no {missing[0]}, so it is no finished result: "
                "delete that line, and the same command makes it again, or start again with --overwrite"
            )


def _ready_model(job: Job) -> PreTrainedModel:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job.settings.seed)
    model = load_model(job.checkpoint, job.computation)
    if job.computation.device == "cuda":  # first calls compile and allocate; no example should pay for that
        attach(model, "fullkv", attn_implementation=job.computation.attn_implementation, fuse=job.computation.fuse)
        try:
            generate(model, torch.ones(WARM_UP_TOKENS, dtype=torch.long), 2, eos_token_id=[])
        finally:
            detach(model)
    return model


class ActiveRun:
    """One method and budget while it runs: its plan, its files, and what it has said.

    Attributes:
        peaks: most bytes of any row of the dataset under way, by device, as far as rows had the devices to themselves.
    """

    def __init__(self, planned: PlannedRun, files: Run, tell: Callable[[str], None]):
        self.planned = planned
        self.files = files
        self.verified = False
        self.peaks: dict[str, int] = {}
        self._tell = tell

    def start(self, environment: dict[str, Any]) -> None:
        self.files.start(self.planned.settings, environment, self.planned.facts)
        for sentence in self.planned.notes:
            self.files.record.note(sentence)

    def note(self, sentence: str) -> None:
        """Tells the user, once, and keeps the sentence in the run record."""
        self._tell(sentence)
        self.files.record.note(sentence)

    def outcome(self, stop: StopSignal) -> int:
        """Exit code of this run."""
        if stop.requested and not self.files.complete:
            return STOPPED
        return 1 if self.files.failed else 0


class Sweep:
    """All active runs over all datasets: each prompt is encoded once and prefilled once for all runs that can share.

    Rows are written as they finish; closing a dataset's file puts it into data order.
    """

    def __init__(self, job: Job, active: list[ActiveRun], attachment: Attachment, stop: StopSignal):
        self.job = job
        self.active = active
        self.attachment = attachment
        self.stop = stop
        self._sharing = _runs_by_plan(active)
        self._halted = False
        ways = {run.planned.decode for run in active}
        self._decode = "graph" if "graph" in ways else ways.pop()

    def run(self) -> None:
        for name, part in self.job.parts.items():
            began = time.perf_counter()
            for run in self.active:
                run.peaks.clear()
            try:
                self._dataset(part)
            finally:
                seconds = time.perf_counter() - began
                for run in self.active:
                    run.files.record.update(name, **_counts(run, name, seconds))
            for run in self.active:
                run.files.results[name].close()
            if self._halted or self.stop.requested:
                return

    def _dataset(self, part: DatasetPart) -> None:
        """Every example that some run has no result for yet."""
        files = [run.files.results[part.name] for run in self.active]
        before = [row["score"] for results in files for row in results.rows() if row.get("error") is None]
        label = self.active[0].planned.paths.label if len(self.active) == 1 else f"{len(self.active)} runs"
        progress = None
        if not self.job.settings.quiet:
            progress = Progress(f"{label} {part.name}", len(part.share) * len(self.active), before)
        try:
            size = self.job.settings.eval_batch_size
            # Alone, rows are timed and equal separate calls bit by bit.
            batch = size * len(self._sharing) if size > 1 else 1
            rows = generate_rows(
                self.attachment.model,
                self._requests(part, progress),
                batch_size=batch,
                decode=self._decode,
                keep_caches=False,
            )
            for request, output, plan in rows:
                for run in self._sharing[id(plan)]:
                    if request.tag.record["_id"] not in run.files.results[part.name].done:
                        self._write(run, part, request.tag, output, progress, request)
                del request, output  # the next prompt runs while this loop waits: its peak has no room for old caches
        finally:
            if progress is not None:
                progress.close()

    def _requests(self, part: DatasetPart, progress: Progress | None) -> Iterator[Request]:
        """Encoded prompts of examples that are not done, until the run is to stop."""
        done = {id(run): set(run.files.results[part.name].done) for run in self.active}
        waiting = [record for record in part.share if any(record["_id"] not in done[id(run)] for run in self.active)]
        encoded = ahead(partial(Example.of, self.job, part), waiting)
        for record, example in zip(waiting, encoded, strict=True):
            if self._halted or self.stop.requested:
                return
            missing = [run for run in self.active if record["_id"] not in done[id(run)]]
            if isinstance(example, Exception):  # recorded for every run that waits for it, and the exit code says so
                for run in missing:
                    self._write(run, part, Example(record), example, progress)
                continue
            for sentence in example.prompt.notes:
                for run in missing:
                    run.note(f"{part.name}: {sentence}")
            reset_peak(self.attachment.model)
            leaders = [runs[0].planned.plan for runs in self._sharing.values() if any(run in missing for run in runs)]
            yield example.request(self.job, part, leaders)

    def _verify(self, run: ActiveRun, request: Request, output: RowOutput) -> None:
        """--verify_decode: the first example of a graph run once more in the loop, before its row is written."""
        decodes = id(run.planned.plan) in self._sharing  # others get the rows of a run that does
        if not self.job.settings.verify_decode or run.verified or not decodes:
            return
        run.verified = True
        if run.planned.decode == "graph":
            run.note(check_against_loop(self.attachment.model, request, output))

    def _write(
        self,
        run: ActiveRun,
        part: DatasetPart,
        example: Example,
        output: RowOutput | Exception,
        progress: Progress | None,
        request: Request | None = None,
    ) -> None:
        """The example's row, or the row that says why it has none: one bad example does not end a sweep."""
        alone = self.job.settings.eval_batch_size == 1 and len(self.active) == 1
        record = example.record
        try:
            if isinstance(output, Exception):
                raise output
            peaks = peaks_by_device(self.attachment.model) if alone else {}
            row = example_row(self.job, part, example, output, peak=sum(peaks.values()) or None)
            run.peaks.update({device: max(run.peaks.get(device, 0), peak) for device, peak in peaks.items()})
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"failed: {part.name}/{record['_id']}: {text}", file=sys.stderr, flush=True)
            row = {"_id": record["_id"], "dataset": part.name} | self.job.suite.place(record) | {"error": text}
            self._halted |= self.job.settings.fail_fast
        else:
            self._verify(run, request, output)
        run.files.results[part.name].append(row)
        if progress is not None:
            progress.step(row.get("score"))
        if "error" not in row:
            _note_large_cache(run.planned, row, run.note)


def _runs_by_plan(active: list[ActiveRun]) -> dict[int, list[ActiveRun]]:
    """id of a plan that decodes -> the runs that get its rows, its own first.

    Runs whose budget has no effect on the method differ in nothing: FullKV is decoded once for all budgets.
    """
    found: dict[int, list[ActiveRun]] = {}
    leaders: dict[str, int] = {}
    for run in active:
        plan = run.planned.plan
        alike = repr(dataclasses.replace(plan, budget=None)) if not plan.uses_budget else id(plan)
        found.setdefault(leaders.setdefault(str(alike), id(plan)), []).append(run)
    return found


def _counts(run: ActiveRun, name: str, seconds: float) -> dict[str, int | float]:
    rows = run.files.results[name].rows()
    done = [row for row in rows if row.get("error") is None]
    before = ((load_record(run.planned.paths.meta) or {}).get("counts") or {}).get(name, {})
    peaks = {f"{PEAK}{device}": peak for device, peak in run.peaks.items()}
    return {key: max(peak, before.get(key, 0)) for key, peak in peaks.items()} | {
        "done": len(done),
        "failed": len(rows) - len(done),
        "truncated": sum(row["truncated"] for row in done),
        "near_tie_rows": sum(row["near_ties"] > 0 for row in done),
        "empty": sum(not row["pred"].strip() for row in done),
        "wall_s": round(before.get("wall_s", 0.0) + seconds, 3),
    }


def _note_large_cache(planned: PlannedRun, row: dict[str, Any], note: Callable[[str], None]) -> None:
    """Says once that a method holds more than FullKV would."""
    held = row["bytes_end"] + row["bytes_aux"]
    if held > row["bytes_full"] and planned.plan.uses_budget:
        note(
            f"{planned.plan.method} at --kv_cache_granularity {planned.plan.granularity} and budget "
            f"{planned.plan.budget.tag} holds a larger cache than FullKV would on some prompts (see bytes_end and "
            "bytes_full)"
        )
