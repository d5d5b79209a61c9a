"""One result file scored again: what one cell of a table knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfactory.data.tasks import LENGTH_BUCKETS, LONGBENCH_E
from kvfactory.metrics import extra_scores, score_example
from kvfactory.reports.eval_files import Rows, read_rows

SCORE_TOLERANCE = 1e-9  # a stored score that is further off was made by another definition
Scorer = Callable[[dict[str, Any]], tuple[float, dict[str, float]]]  # row -> score in [0, 1], further metrics
COSTS = ("bytes_end", "bytes_full", "ratio", "kept_tokens", "seconds")


@dataclass(frozen=True)
class Example:
    """One scored row. Costs are None where the file does not have them.

    Attributes:
        score: in [0, 1].
        length: LongBench's length (words or characters), None where the row has none.
        kept: mean number of kept tokens per stored head.
        seconds: prefill and decode; None for rows that shared a batch.
    """

    id: str
    score: float
    length: float | None
    empty: bool
    truncated: bool | None
    bytes_end: float | None
    bytes_full: float | None
    kept: float | None
    seconds: float | None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass
class Cell:
    """One method on one dataset. Scores are percentages.

    Attributes:
        planned: examples the run set out to do, None where unknown.
        n_error: examples that have no result, only an error.
        errors_as_zero: those are among `examples`, with a score of 0.
        buckets: LongBench-E: {bucket: score or None}, else empty.
        ours: the rows carry kvfactory's own fields.
    """

    dataset: str
    examples: list[Example]
    n_error: int = 0
    planned: int | None = None
    errors_as_zero: bool = False
    buckets: dict[str, float | None] = field(default_factory=dict)
    ours: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.examples)

    @property
    def mean(self) -> float | None:
        """Unrounded mean in percent; None without examples."""
        return 100 * sum(e.score for e in self.examples) / self.n if self.n else None

    @property
    def score(self) -> float | None:
        return None if self.mean is None else dataset_score(self.mean)

    @property
    def stderr(self) -> float | None:
        return standard_error([e.score for e in self.examples])

    @property
    def bucket_mean(self) -> float | None:
        """Mean of the bucket scores, the headline of LongBench-E; None when a bucket is empty."""
        values = [v for v in self.buckets.values() if v is not None]
        return round(sum(values) / len(values), 2) if values and len(values) == len(self.buckets) else None

    @property
    def incomplete(self) -> bool:
        return self.n < self._wanted

    @property
    def mark(self) -> str:
        """`n<N` when fewer examples are scored than the run set out to do, else empty."""
        return f"{self.n}<{self._wanted}" if self.incomplete else ""

    @property
    def _wanted(self) -> int:
        seen = self.n if self.errors_as_zero else self.n + self.n_error
        return max(self.planned or 0, seen)

    def as_dict(self) -> dict[str, Any]:
        counts = count_examples([self])
        record = {"score": self.score, "mean": self.mean, "stderr": self.stderr, **counts, "planned": self.planned}
        record |= {"complete": not self.incomplete, **mean_costs(self.examples)}
        if self.buckets:
            record |= {"buckets": self.buckets, "bucket_mean": self.bucket_mean}
        return record | {"extra": mean_extra(self.examples)}


def dataset_score(mean: float) -> float:
    """LongBench's score of a dataset, of which averages over datasets are made: the mean with two decimals."""
    return round(mean, 2)


def standard_error(scores: list[float]) -> float | None:
    """100 * sd / sqrt(n) with the sample standard deviation (n - 1); None below two scores."""
    n = len(scores)
    if n < 2:
        return None
    mean = sum(scores) / n
    return 100 * math.sqrt(sum((s - mean) ** 2 for s in scores) / (n - 1) / n)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Mean over the values that are not None; None when there is none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def mean_costs(examples: list[Example]) -> dict[str, float | None]:
    """Means over the examples that know them; `ratio` is total bytes_end over total bytes_full."""
    both = [e for e in examples if e.bytes_end is not None and e.bytes_full]
    return {
        "bytes_end": mean_known(e.bytes_end for e in examples),
        "bytes_full": mean_known(e.bytes_full for e in examples),
        "ratio": sum(e.bytes_end for e in both) / sum(e.bytes_full for e in both) if both else None,
        "kept_tokens": mean_known(e.kept for e in examples),
        "seconds": mean_known(e.seconds for e in examples),
    }


def mean_extra(examples: list[Example]) -> dict[str, float]:
    """Dataset scores (percent, two decimals) of the further metrics."""
    names = examples[0].extra if examples else ()
    return {name: round(100 * sum(e.extra.get(name, 0.0) for e in examples) / len(examples), 2) for name in names}


def count_examples(cells: Iterable[Cell]) -> dict[str, int | None]:
    """n, n_empty, n_error and n_truncated over some cells; n_truncated is None when no file says what was cut."""
    cells = list(cells)
    examples = [e for cell in cells for e in cell.examples]
    known = [e.truncated for e in examples if e.truncated is not None]
    return {
        "n": len(examples),
        "n_empty": sum(e.empty for e in examples),
        "n_error": sum(cell.n_error for cell in cells),
        "n_truncated": sum(known) if known else None,
    }


def score_file(
    path: Path, dataset: str, planned: int | None = None, errors_as_zero: bool = False, extra: bool = False
) -> Cell:
    """Score every row of a LongBench result file again, from its prediction and answers alone.

    Args:
        dataset: canonical name; the folder's, whatever the rows say.
        planned: examples the run set out to do.
        errors_as_zero: count a failed example as a prediction that scores 0.
        extra: also compute `kvfactory.metrics.extra_scores`.

    Raises:
        ValueError: the file cannot be read or scored; the sentence names file and line or `_id`.
    """

    def scores(row: dict[str, Any]) -> tuple[float, dict[str, float]]:
        arguments = (dataset, row["pred"], row["answers"], row.get("all_classes"))
        return score_example(*arguments), extra_scores(*arguments) if extra else {}

    cell = score_rows(read_rows(path), path, dataset, scores, planned, errors_as_zero)
    if dataset in LONGBENCH_E:
        cell.buckets = _buckets(cell, f"{path.parent.name}/{path.name}")
    return cell


def score_rows(
    rows: Rows, path: Path, dataset: str, scores: Scorer, planned: int | None = None, errors_as_zero: bool = False
) -> Cell:
    """The cell of a file's rows, in any benchmark.

    Args:
        path: the file, for messages; notes begin with its folder's name and its own.
        scores: ValueError for a row that cannot be scored.
        dataset, planned, errors_as_zero: as in `score_file`.

    Raises:
        ValueError: a row that cannot be scored; the sentence names file and `_id`.
    """
    name = f"{path.parent.name}/{path.name}"
    examples, differing, strangers = [], [], 0
    for row in rows.done:
        example = _score_row(row, path, scores)
        stored = _number(row.get("score"))
        if stored is not None and abs(stored - example.score) > SCORE_TOLERANCE:
            differing.append(example.id)
        examples.append(example)
        strangers += str(row.get("dataset", dataset)).lower().removesuffix("_e") != dataset.removesuffix("_e")
    cell = Cell(dataset, examples, len(rows.failed), planned, errors_as_zero, notes=list(rows.notes))
    cell.ours = any("bytes_end" in row or "kept_tokens" in row for row in rows.done)
    if not rows.done and not rows.failed:
        cell.notes.append(f"{name}: the file is empty.")
    if differing:
        cell.notes.append(
            f"{name}: the stored score of {len(differing)} rows is not what rescoring gives (first: {differing[0]}); "
            "the table shows the rescored values."
        )
    if strangers:
        cell.notes.append(f"{name}: {strangers} rows name another dataset; all are scored as {dataset}.")
    if rows.failed:
        treated = "count as 0" if errors_as_zero else "are left out"
        cell.notes.append(f"{name}: {len(rows.failed)} examples failed and {treated}.")
    if errors_as_zero:
        cell.examples += [_failed_example(row) for row in rows.failed]
    return cell


def _failed_example(row: dict[str, Any]) -> Example:
    return Example(row["_id"], 0.0, _number(row.get("length")), False, None, None, None, None, None)


def _score_row(row: dict[str, Any], path: Path, scores: Scorer) -> Example:
    try:
        score, further = scores(row)
    except ValueError as error:
        raise ValueError(f"{path}, _id {row['_id']}: {error}") from error
    kept = row.get("kept_tokens")
    prefill, decode = _number(row.get("prefill_s")), _number(row.get("decode_s"))
    truncated = row.get("truncated")
    return Example(
        id=row["_id"],
        score=score,
        length=_number(row.get("length")),
        empty=not row["pred"].strip(),
        truncated=truncated if isinstance(truncated, bool) else None,
        bytes_end=_number(row.get("bytes_end")),
        bytes_full=_number(row.get("bytes_full")),
        kept=_number(kept.get("mean")) if isinstance(kept, dict) else None,
        seconds=prefill + decode if prefill is not None and decode is not None else None,
        extra=further,
    )


def _number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _buckets(cell: Cell, name: str) -> dict[str, float | None]:
    """Scores of LongBench-E's three length buckets; all None when a row has no length."""
    if any(e.length is None for e in cell.examples):
        cell.notes.append(f"{name}: rows without a length, so there are no length buckets.")
        return {bucket: None for bucket, _, _ in LENGTH_BUCKETS}
    result: dict[str, float | None] = {}
    for bucket, low, high in LENGTH_BUCKETS:
        scores = [e.score for e in cell.examples if e.length >= low and (high is None or e.length < high)]
        result[bucket] = round(100 * sum(scores) / len(scores), 2) if scores else None
    return result
