"""Finding and reading result files: ours and those of KVCache-Factory, in any spelling of the method's name.

Layout: `{results_dir}/{dataset}/{Method[+suffix]}.json` with run records in `{results_dir}/meta/`; a folder of such
run folders is accepted too. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfactory.data.tasks import LONGBENCH_E, TASKS
from kvfactory.reports.records import Line, effective_lines, read_lines
from kvfactory.reports.run_record import load_record

# The canonical spellings, in the order of the tables. The method registry holds the same names but needs torch to
# load; tests/test_eval.py compares the two.
METHOD_NAMES = (
    *("FullKV", "StreamingLLM", "H2O", "SnapKV", "L2Norm", "Quest", "NACL", "Scissorhands", "MiniCache", "PyramidKV"),
    *("AdaKV", "HeadKV", "CAM", "ThinK", "HeadInfer", "MInference", "Random", "Oracle"),
)
_CANONICAL = {name.lower(): name for name in METHOD_NAMES}
_SHARD = re.compile(r"\.shard\d+(of\d+)?$")
_DATASET_ORDER = {name: i for i, name in enumerate((*TASKS, *LONGBENCH_E))}
_SETTINGS_PARTS = ("settings", "args", "run")  # where a run record may keep what is not at its top level


def canonical_label(stem: str) -> str:
    """`snapkv+kv_head` -> `SnapKV+kv_head`; an unknown method keeps its spelling."""
    method, plus, suffix = stem.partition("+")
    return _CANONICAL.get(method.lower(), method) + plus + suffix


def label_order(label: str) -> tuple[int, str, str]:
    """Sort key: methods in canonical order, unknown ones last, each before its variants."""
    method = label.partition("+")[0]
    return (METHOD_NAMES.index(method) if method in METHOD_NAMES else len(METHOD_NAMES), method, label)


def dataset_order(dataset: str) -> int:
    """Sort key: LongBench's own order, LongBench-E sets after it."""
    return _DATASET_ORDER[dataset]


@dataclass
class RunFolder:
    """One `{model}_{budget}` folder.

    Attributes:
        files: {label: {dataset: path}}, only files that are there.
        records: {label: run record}, where there is one.
        notes: what the reader of the tables must know, one sentence each.
    """

    path: Path
    files: dict[str, dict[str, Path]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name


@dataclass
class Rows:
    """Content of one result file: `done` rows that can be scored, `failed` rows that only hold an error."""

    done: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    notes: list[str]


def _dataset_of(folder: Path) -> str | None:
    return folder.name.lower() if folder.name.lower() in _DATASET_ORDER else None


def result_names(folder: Path) -> list[str]:
    """Names of the result files, or run records, in a folder."""
    # The original writes its metrics.json beside the predictions.
    names = sorted(p.name for p in folder.glob("*.json") if p.is_file() and not p.name.startswith("."))
    return [name for name in names if name.lower() != "metrics.json"]


def subfolders(folder: Path) -> list[Path]:
    """Visible subfolders, by name."""
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _is_run(folder: Path) -> bool:
    return any(_dataset_of(sub) and result_names(sub) for sub in subfolders(folder))


def find_runs(results_dir: str | Path) -> list[RunFolder]:
    """The run folder at `results_dir`, or the run folders inside it.

    Raises:
        ValueError: there is no such folder, or no result file where one is looked for, or two files of one dataset
            stand for the same method.
    """
    root = Path(results_dir)
    if not root.is_dir():
        raise ValueError(
            f"--results_dir {results_dir} is not a folder: give a run folder such as model_512, or its parent."
        )
    runs = [_read_run(sub) for sub in ([root] if _is_run(root) else subfolders(root)) if _is_run(sub)]
    if not runs:
        hint = ""
        if _dataset_of(root.resolve()):
            hint = " This is a dataset's folder: give the folder above it."
        raise ValueError(
            f"--results_dir {results_dir} holds no result files: {{dataset}}/{{Method}}.json is looked for in it and "
            f"in its subfolders.{hint}"
        )
    return with_results(runs)


def with_results(runs: list[RunFolder]) -> list[RunFolder]:
    """The runs that hold a result file; what is to be told of the others is told with the first one.

    Raises:
        ValueError: no run does, because shards have not been merged.
    """
    full = [run for run in runs if run.files]
    if not full:
        raise ValueError(
            f"{', '.join(str(run.path) for run in runs)}: there are results of shards alone; join them first, by the "
            "runner's call with --merge_shards instead of --shard_id"
        )
    full[0].notes += [f"{run.name} is left out: {note}" for run in runs if not run.files for note in run.notes]
    return full


def _read_run(folder: Path) -> RunFolder:
    places, notes = [], []
    for sub in subfolders(folder):
        dataset = _dataset_of(sub)
        if dataset is not None:
            places.append((dataset, sub))
        elif sub.name != "meta" and result_names(sub):
            notes.append(f"{sub.name}/ is ignored: it is not named after a LongBench dataset.")
    return read_run(folder, places, notes)


def read_run(folder: Path, places: Iterable[tuple[str, Path]], notes: Iterable[str] = ()) -> RunFolder:
    """The run folder with its records and the files that lie in `places`.

    Args:
        places: (dataset, folder of its result files).
        notes: what the search for the places found worth telling.

    Raises:
        ValueError: two files of one dataset stand for the same method, or a run record cannot be read.
    """
    run = RunFolder(folder, notes=list(notes))
    for dataset, sub in places:
        names = result_names(sub)
        shown = sub.relative_to(folder)
        shards = [name for name in names if _SHARD.search(name.removesuffix(".json"))]
        if shards:
            run.notes.append(f"{shown}/ holds shard files that must be merged first ({', '.join(shards)}); ignored.")
        for name in names:
            if name in shards:
                continue
            label = canonical_label(name.removesuffix(".json"))
            known = run.files.setdefault(label, {})
            if dataset in known:
                raise ValueError(
                    f"{known[dataset]} and {sub / name} both stand for {label} on {dataset}: rename or remove one."
                )
            known[dataset] = sub / name
    for name in result_names(folder / "meta") if (folder / "meta").is_dir() else []:
        stem = name.removesuffix(".json")
        if not _SHARD.search(stem):
            run.records[canonical_label(stem)] = _read_record(folder / "meta" / name)
    run.files = {label: run.files[label] for label in sorted(run.files, key=label_order) if run.files[label]}
    return run


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the run record {path} cannot be read: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"the run record {path} must hold one JSON object.")
    if "made_otherwise" in record:  # ours, so that all the rest must be there too
        load_record(path)
    return record


def record_value(record: dict[str, Any] | None, *keys: str) -> str | None:
    """The first of `keys` that the run record has, at its top or among its settings, as text."""
    if record is None:
        return None
    for part in (record, *(record.get(name) for name in _SETTINGS_PARTS)):
        for key in keys:
            value = part.get(key) if isinstance(part, dict) else None
            if isinstance(value, dict):
                value = value.get("source")
            if value is not None:
                return str(value)
    return None


def planned_examples(record: dict[str, Any] | None, dataset: str) -> int | None:
    """Examples the run set out to do: the record's number, else the full dataset's; None where neither is known."""
    entry = ((record or {}).get("datasets") or {}).get(dataset)
    planned = entry.get("examples") if isinstance(entry, dict) else None
    if isinstance(planned, int):
        return planned
    return TASKS[dataset].examples if dataset in TASKS else None


def read_rows(path: Path, parse: Callable[[Path], tuple[list[Line], int]] = read_lines) -> Rows:
    """Rows of one result file, one per `_id` (its first result, else its last failure), in file order.

    Args:
        parse: gives the file's whole lines and how many bytes they take.

    Raises:
        ValueError: a line that is broken and not the last, or a row without an answer to score; file and line named.
    """
    lines, whole = parse(path)
    name = f"{path.parent.name}/{path.name}"
    notes = []
    if path.stat().st_size > whole:
        notes.append(f"{name}: a torn last line is left out.")
    chosen = list(effective_lines(lines).values())
    done = [line for line in chosen if not line.failed]
    repeated = sum(not line.failed for line in lines) - len(done)
    if repeated:
        notes.append(f"{name}: {repeated} repeated results are left out, the first of each _id counts.")
    for line in done:
        row = line.row
        answers = row.get("answers")
        if not isinstance(row.get("pred"), str) or not isinstance(answers, list):
            raise ValueError(f"{path} line {line.number} needs the fields pred (text) and answers (list) to be scored.")
    return Rows([line.row for line in done], [line.row for line in chosen if line.failed], notes)
