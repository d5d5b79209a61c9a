"""Result files of one or several run folders brought together: rows of methods, columns of datasets, averages.

An average is over a named, fixed set of datasets and stays empty for a row that misses one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvfactory.data.tasks import CATEGORIES, CHINESE_DATASETS, DEFAULT_DATASETS, LONGBENCH_E, TASKS
from kvfactory.reports.eval_cells import Cell, Example, score_file
from kvfactory.reports.eval_files import RunFolder, dataset_order, planned_examples, record_value
from kvfactory.reports.run_record import mixture

# Stored at kv heads in either granularity, since every query head of a group would hold the same tokens.
_SAME_FOR_ALL_HEADS = ("FullKV", "StreamingLLM", "L2Norm")
T = TypeVar("T")  # a dataclass with name, rows and notes
_CAPTION_KEYS = {
    "preset": ("preset",),
    "protocol": ("protocol",),
    "prompts": ("prompts", "prompts_source", "prompt_source"),
}


@dataclass
class MethodRow:
    """One method under one budget.

    Attributes:
        run: the run folder's name.
        cells: {dataset: cell}; a dataset without a file is absent.
        granularity: "query_head", "kv_head", or "" where nothing says which.
        facts: preset, protocol and prompts from the run record, None each where it does not say.
    """

    run: str
    label: str
    cells: dict[str, Cell]
    granularity: str
    facts: dict[str, str | None]

    @property
    def shown(self) -> str:
        """The label, with the word query_head if that is how the cache is stored."""
        named = "query_head" in self.label.split("+")
        return f"{self.label} (query_head)" if self.granularity == "query_head" and not named else self.label

    @property
    def examples(self) -> list[Example]:
        return [e for cell in self.cells.values() for e in cell.examples]

    def mean_over(self, datasets: tuple[str, ...], value: str = "score") -> float | None:
        """Mean of the dataset scores over `datasets`, two decimals; None if one is missing."""
        scores = [getattr(self.cells[d], value) if d in self.cells else None for d in datasets]
        return None if None in scores or not scores else round(sum(scores) / len(scores), 2)

    def marked(self, datasets: tuple[str, ...]) -> bool:
        return any(d in self.cells and self.cells[d].incomplete for d in datasets)


@dataclass(frozen=True)
class Average:
    """One column of means.

    Attributes:
        name: says which datasets; `key` names them all where `name` only counts them.
        value: the property of a cell that is averaged.
        groups: for the mean of category means: the datasets of each category.
    """

    name: str
    datasets: tuple[str, ...]
    value: str = "score"
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def key(self) -> str:
        return self.name if not self.name.startswith("avg of") else f"{self.name} ({'+'.join(self.datasets)})"

    def of(self, row: MethodRow) -> float | None:
        if not self.groups:
            return row.mean_over(self.datasets, self.value)
        means = [row.mean_over(group) for group in self.groups]
        return None if None in means else round(sum(means) / len(means), 2)


@dataclass
class EvalTable:
    """Everything the written reports show of some run folders."""

    name: str
    rows: list[MethodRow]
    notes: list[str] = field(default_factory=list)

    @property
    def datasets(self) -> list[str]:
        return sorted({d for row in self.rows for d in row.cells}, key=dataset_order)

    @property
    def plain(self) -> tuple[str, ...]:
        """Datasets that are not LongBench-E."""
        return tuple(d for d in self.datasets if d in TASKS)

    @property
    def uniform(self) -> tuple[str, ...]:
        """LongBench-E datasets."""
        return tuple(d for d in self.datasets if d in LONGBENCH_E)

    @property
    def several_runs(self) -> bool:
        return len({row.run for row in self.rows}) > 1

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """{category: its datasets in this table}, categories without one left out."""
        members = {c: tuple(d for d in self.plain if TASKS[d].category == c) for c in CATEGORIES}
        return {c: m for c, m in members.items() if m}

    def averages(self) -> list[Average]:
        """The average columns, from the published ones to what this table alone has."""
        plain, uniform = self.plain, self.uniform
        result = []
        if set(DEFAULT_DATASETS) <= set(plain):
            result.append(Average("avg 16 default", DEFAULT_DATASETS))
        if set(CHINESE_DATASETS) <= set(plain):
            result.append(Average("avg 5 Chinese", CHINESE_DATASETS))
        if len(plain) == len(TASKS):
            result.append(Average("avg 21 all", plain))
        elif plain and set(plain) not in (set(DEFAULT_DATASETS), set(CHINESE_DATASETS)):
            result.append(Average(f"avg of {len(plain)}", plain))
        common = tuple(d for d in plain if all(d in row.cells for row in self.rows))
        if len(self.rows) > 1 and 1 < len(common) < len(plain):
            result.append(Average(f"avg of {len(common)} common", common))
        groups = tuple(self.categories.values())
        if len(groups) > 1:
            result.append(Average(f"mean of {len(groups)} categories", plain, groups=groups))
        if uniform:
            named = f"avg {len(uniform)} E" if len(uniform) == len(LONGBENCH_E) else f"avg of {len(uniform)} E"
            result.append(Average(named, uniform))
            result.append(Average(f"{named}, bucket means", uniform, value="bucket_mean"))
        return result

    def captions(self) -> list[str]:
        """What a reader must know before comparing numbers, one line each."""
        lines = fact_captions(self.rows)
        if any(row.facts["prompts"] == "kvfactory" for row in self.rows):
            lines.append("Prompts are kvfactory's own wording: scores are not comparable with published ones.")
        lines += origin_captions(self.rows)
        small = {d: n for row in self.rows for d, c in row.cells.items() if (n := c.planned) and n < _full_size(d)}
        if small:
            parts = ", ".join(
                f"{d} {n} of {_full_size(d)}" for d, n in sorted(small.items(), key=lambda i: dataset_order(i[0]))
            )
            lines.append(f"Fewer examples than LongBench has: {parts}.")
        lines += mark_captions(self.rows)
        for average in self.averages():
            if average.key != average.name and len(average.datasets) > 1:
                lines.append(f"{average.name}: {', '.join(average.datasets)}.")
        return lines


def fact_captions(rows: list[MethodRow]) -> list[str]:
    """Under which settings the rows were made, one line each."""
    lines = []
    for fact in rows[0].facts:
        known = _by_value(rows, {id(row): row.facts[fact] for row in rows})
        if known:
            lines.append(f"{fact}: {known}")
    stored = _by_value(rows, {id(row): row.granularity or None for row in rows})
    return lines + ([f"cache stored per: {stored}"] if stored else [])


def origin_captions(rows: list[MethodRow]) -> list[str]:
    """Which rows have no run record, or an empty list."""
    without = [row.label for row in rows if not any(row.facts.values())]
    return [f"No run record says how these were made: {', '.join(dict.fromkeys(without))}."] if without else []


def mark_captions(rows: list[MethodRow]) -> list[str]:
    """What the marks of unfinished cells mean, or an empty list."""
    marked = any(row.marked(tuple(row.cells)) for row in rows)
    return ["n<N: only n of N examples are scored; * marks a mean over such cells."] if marked else []


def _full_size(dataset: str) -> int:
    return TASKS[dataset].examples if dataset in TASKS else 0


def _by_value(rows: list[MethodRow], values: dict[int, str | None]) -> str:
    """`factory` when all rows agree, else `factory (SnapKV, H2O); paper (AdaKV)`; rows without a value left out."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if values[id(row)] is not None:
            groups.setdefault(values[id(row)], []).append(row.label)
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(rows):
        return next(iter(groups))
    return "; ".join(f"{value} ({', '.join(dict.fromkeys(labels))})" for value, labels in groups.items())


def stored_granularity(label: str, record: dict[str, Any] | None, cells: dict[str, Cell]) -> str:
    """MethodRow's `granularity`, from the record, else from the file's name and rows."""
    recorded = record_value(record, "kv_cache_granularity", "granularity")
    if recorded:
        return recorded
    method, *suffixes = label.split("+")
    for word in ("kv_head", "query_head"):
        if word in suffixes:
            return word
    # Without a record our file names still tell: query_head is the default and so has no suffix.
    ours = any(cell.ours for cell in cells.values())
    return "query_head" if ours and method not in _SAME_FOR_ALL_HEADS else ""


def score_run(run: RunFolder, errors_as_zero: bool = False, extra: bool = False) -> EvalTable:
    """Score every file of a run folder.

    Raises:
        ValueError: a file cannot be read or scored.
    """
    rows, notes = [], list(run.notes)
    for label, files in run.files.items():
        record = run.records.get(label)
        cells = {}
        for dataset in sorted(files, key=dataset_order):
            cells[dataset] = score_file(
                files[dataset], dataset, planned_examples(record, dataset), errors_as_zero, extra
            )
            notes += cells[dataset].notes
        notes += recorded_notes(label, record)
        facts = {fact: record_value(record, *keys) for fact, keys in _CAPTION_KEYS.items()}
        rows.append(MethodRow(run.name, label, cells, stored_granularity(label, record, cells), facts))
    return EvalTable(run.name, rows, notes)


def recorded_notes(label: str, record: dict[str, Any] | None) -> list[str]:
    """The run record's sentences for the reader, and one for results mixed by force, each with the label in front."""
    notes = (record or {}).get("notes")
    sentences = [*(notes if isinstance(notes, list) else []), mixture(record)]
    return [f"{label}: {sentence}" for sentence in sentences if sentence is not None]


def join_tables(name: str, tables: list[T]) -> T:
    """All rows of several run folders in one table; notes get the folder's name in front."""
    notes = [f"{table.name}: {note}" for table in tables for note in table.notes]
    return replace(tables[0], name=name, rows=[row for table in tables for row in table.rows], notes=notes)
