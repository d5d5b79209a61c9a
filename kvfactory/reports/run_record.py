"""The run record, `meta/{label}.json`: what every result file of this label was made with.

    {"label": ..., "shard": [K, N] or null,
     "settings": {...},                    all result-relevant settings, resolved; model, tokenizer, template hashes
     "notes": [...],                       sentences for the reader, e.g. a recalled value in force
     "datasets": {name: {"examples": n, "sha256": ..., ...}},
     "counts": {name: {"truncated": n, ...}},
     "segments": [{"id", "start", "end", "exit", "overwrite", "argv", "versions", "code", "hardware", ...}],
     "replaced": [{"at": ..., "settings": {...}, "datasets": {...}}]}      what --overwrite put aside

A run that goes on under other settings or on other data is refused; --resume force lets it, and `made_otherwise` then
lists the rows that are not of `settings` and `datasets`. Two processes may work on different datasets of one label at
the same time, so each change is read, merged and replaced under a short lock.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvfactory.reports.files import FileLock, json_bytes, write_atomically
from kvfactory.reports.run_paths import RunPaths
from kvfactory.settings import shown

NOT_COMPARED = ("examples",)  # of a dataset's facts: a resumed run may go further than the one before
PEAK = "peak_mem_bytes_"
"""How counters begin that are the most of any row, here of one device: of shards the largest counts, not the sum."""
_ABSENT = object()


def load_record(path: Path) -> dict[str, Any] | None:
    """The record at `path`, None when there is none; ValueError naming file and reason when it cannot be read."""
    try:
        record = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"cannot read the run record {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the run record {path} is broken ({error}): delete it and its results") from error
    expected = {"settings": dict, "notes": list, "datasets": dict, "counts": dict, "segments": list, "replaced": list}
    wrong = [k for k, kind in expected.items() if not isinstance(record, dict) or not isinstance(record.get(k), kind)]
    if wrong:
        raise ValueError(f"{path} is no run record: it lacks {', '.join(wrong)}; delete it and its results")
    if broken := _broken(record):
        raise ValueError(f"the run record {path} is broken ({broken}): delete it and its results")
    return record


def _broken(record: Mapping[str, Any]) -> str | None:
    """What is wrong inside the parts of a record, which only an edit by hand can leave; None for a sound one."""
    for name in ("datasets", "counts"):
        for of, facts in record[name].items():
            if not isinstance(facts, dict):
                return f"{name} has no object at {shown(of)}"
    for of, counters in record["counts"].items():
        for key, value in counters.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                return f"counts has no number at {shown(of)}, {shown(key)}"
    segments = record["segments"]
    if record["datasets"] and not segments:
        return "segments names no call that made its datasets"
    if not all(isinstance(s, dict) and all(isinstance(s.get(k), str) for k in ("id", "start")) for s in segments):
        return "segments does not list calls with the id and the start of each"
    listed = record.get("made_otherwise", [])
    if not isinstance(listed, list) or not all(map(_is_entry, listed)):
        return "made_otherwise does not list rows with the settings, datasets and segments that made them"
    return None


def _is_entry(entry: Any) -> bool:
    """Whether `entry` is one of `made_otherwise`, as `list_rows` makes them."""
    expected = {"settings": dict, "datasets": dict, "segments": list, "rows": dict}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(k), kind) for k, kind in expected.items()):
        return False
    ids = [isinstance(ids, list) and all(isinstance(i, str) for i in ids) for ids in entry["rows"].values()]
    return all(ids) and all(isinstance(entry["datasets"].get(name), dict) for name in entry["rows"])


def save_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record whole; the caller holds its lock."""
    write_atomically(path, json_bytes(record, indent=1) + b"\n")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """One phrase for each key whose values differ, nested keys dotted: `window_size: 8 on record, now 32`."""
    for key in sorted({*old, *new}):
        a, b = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}: {_shown(a, b)} on record, now {_shown(b, a)}"


def _shown(value: Any, other: Any) -> str:
    """`value` short enough for a message, cut so that the place where it parts from `other` stays visible."""
    if value is _ABSENT:
        return "nothing"
    text, beside = (json.dumps(v, ensure_ascii=True) if v is not _ABSENT else "" for v in (value, other))
    if len(text) <= 80:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, beside, strict=False)) if a != b), 0)
    start = max(0, same - 20)
    return ("..." if start else "") + text[start : start + 74] + "..."


class RunRecord:
    """The record at `paths.meta`; nothing is written before `start`."""

    def __init__(self, paths: RunPaths):
        self.paths = paths
        self.segment = uuid.uuid4().hex[:12]
        self._started = False

    def check(
        self,
        settings: Mapping[str, Any],
        datasets: Mapping[str, Mapping[str, Any]],
        overwrite: bool = False,
        force: bool = False,
    ) -> list[str]:
        """Refuse to add to results that were made otherwise.

        Args:
            settings: every result-relevant setting, resolved, JSON values only; nested dicts are compared key by key.
            datasets: facts per dataset of this run (`examples`, `sha256`, ...); of those on both sides all but
                `examples` must agree.
            overwrite: the results of `datasets` are about to be discarded; refused only when results of further
                datasets would be left under settings that are not theirs.
            force: differences are no reason to refuse, except that settings change for all recorded datasets at once:
                of those that this run does not own, another process may be writing rows.

        Returns:
            One phrase for each difference that `force` has let through.

        Raises:
            ValueError: names the record and each differing key with both values; results without a record.
        """
        return self._check(load_record(self.paths.meta), _plain(settings), _plain(datasets), overwrite, force)

    def _check(self, record: dict | None, settings: dict, datasets: dict, overwrite: bool, force: bool) -> list[str]:
        recorded = record["datasets"] if record else {}
        changed = list(differences(record["settings"], settings)) if record else []
        select = "add them to --datasets" + (
            " and examples of theirs to the file of --ids" if settings.get("ids") else ""
        )
        if overwrite:
            left = [d for d in recorded if d not in datasets and self.paths.results(d).exists()]
            if changed and left:
                raise ValueError(
                    f"--overwrite of {', '.join(datasets)} would leave results on {', '.join(left)} beside a record "
                    f"that is not theirs ({'; '.join(changed)}): {select}, or choose another --run_name"
                )
            return []
        others = [name for name in recorded if name not in datasets]
        if force and changed and others:
            raise ValueError(
                f"--resume force would change the settings of {', '.join(others)} as well, which {self.paths.meta} "
                f"has too ({'; '.join(changed)}): {select}, or choose another --run_name"
            )
        for name, facts in datasets.items():
            if name in recorded:
                changed += _changed(recorded[name], facts, f"{name}.")
            elif self.paths.results(name).exists():
                raise ValueError(
                    f"{self.paths.results(name)} holds results, but {self.paths.meta} does not say how they were "
                    "made: move them away, or start again with --overwrite"
                )
        if changed and not force:
            raise ValueError(
                f"{self.paths.meta} was made with other settings or data ({'; '.join(changed)}): replace its results "
                "with --overwrite, keep them with another --run_name or --save_dir, or mix them with --resume force"
            )
        return changed

    def start(
        self,
        settings: Mapping[str, Any],
        environment: Mapping[str, Any],
        datasets: Mapping[str, Mapping[str, Any]],
        done: Mapping[str, Iterable[str]],
        overwrite: bool = False,
        force: bool = False,
    ) -> None:
        """`check`, then write the record with a new segment; with `overwrite` what differs moves to `replaced`.

        Listed rows of these datasets whose result is gone are forgotten before a row is made, so that one made again
        under the settings on record cannot be taken for the old one, wherever the run is killed.

        Args:
            environment: from `kvfactory.reports.environment.collect_environment`.
            done: the `_id`s of each of `datasets` that have a result and keep it.
        """
        settings, datasets = _plain(settings), _plain(datasets)

        def begin(record: dict[str, Any]) -> None:
            known = record["segments"] or record["datasets"]
            self._check(record if known else None, settings, datasets, overwrite, force)
            if known and force:
                same = record["settings"] == settings
                stays = [d for d in done if same and not _changed(record["datasets"].get(d, {}), datasets[d])]
                set_apart(record, record, {d: ids for d, ids in done.items() if d not in stays})
            again = {d: record["datasets"].pop(d) for d in datasets if overwrite and d in record["datasets"]}
            if known and overwrite and (again or record["settings"] != settings):
                old = {"at": _now(), "settings": record["settings"], "datasets": again}
                gone = {*again, *(record["datasets"] if record["settings"] != settings else ())}
                if taken := take_listed(record, lambda name, _: name in gone):
                    old["made_otherwise"] = taken
                record["replaced"].append(old)
            held = {name: set(ids) for name, ids in done.items()}
            take_listed(record, lambda name, i: name in held and i not in held[name])
            for name in again:
                record["counts"].pop(name, None)
            if record["settings"] != settings and overwrite:
                record["datasets"], record["counts"] = {}, {}  # their results are gone, `_check` has seen to that
            record["settings"] = settings
            for name, facts in datasets.items():
                record["datasets"][name] = record["datasets"].get(name, {}) | facts
            segment = {"id": self.segment, "start": _now(), "end": None, "exit": None, "overwrite": overwrite}
            record["segments"].append(segment | _plain(environment))

        self._change(begin)
        self._started = True

    def update(self, dataset: str, **counts: int | float) -> None:
        """Set counters of one dataset, e.g. `truncated=12`; they add up when shards are joined, but for `PEAK`."""
        self._change(lambda record: record["counts"].setdefault(dataset, {}).update(_plain(counts)))

    def note(self, sentence: str) -> None:
        """Add one sentence for the reader of the record, once."""

        def add(record: dict[str, Any]) -> None:
            if sentence not in record["notes"]:
                record["notes"].append(sentence)

        self._change(add)

    def close(self, exit_code: int | None = None) -> None:
        """Note this segment's end; without `start`, nothing."""
        if not self._started:
            return

        def end(record: dict[str, Any]) -> None:
            for segment in record["segments"]:
                if segment["id"] == self.segment:
                    segment.update(end=_now(), exit=exit_code)

        self._change(end)
        self._started = False

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        with FileLock(self.paths.meta, wait=True):
            record = load_record(self.paths.meta) or empty_record(self.paths)
            change(record)
            save_record(self.paths.meta, record)


def set_apart(record: dict[str, Any], source: Mapping[str, Any], rows: Mapping[str, Iterable[str]]) -> None:
    """Notes in `record` that `rows`, so far as it does not list them yet, were made as `source` says, not as it says.

    Args:
        source: a record, perhaps the same one before it changes. The entry names all its segments; those that made
            rows of entries before it are among them.
        rows: `_id`s by dataset.
    """
    list_rows(record, {**source, "segments": [segment["id"] for segment in source["segments"]]}, rows)


def list_rows(record: dict[str, Any], made: Mapping[str, Any], rows: Mapping[str, Iterable[str]]) -> None:
    """`set_apart` by an entry that is there already: `settings`, `datasets` and `segments` are those of `made`."""
    listed = record.get("made_otherwise", [])
    fresh = {}
    for name, ids in rows.items():
        known = {i for entry in listed for i in entry["rows"].get(name, ())}
        if left := [i for i in ids if i not in known]:
            fresh[name] = left
    if fresh:
        entry = {
            "settings": made["settings"],
            "datasets": {name: made["datasets"].get(name, {}) for name in fresh},
            "segments": made["segments"],
            "rows": fresh,
        }
        record["made_otherwise"] = [*listed, entry]


def take_listed(record: dict[str, Any], wanted: Callable[[str, str], bool]) -> list[dict[str, Any]]:
    """Entries of the rows for which `wanted(dataset, _id)` holds, which `record` then lists no more."""
    taken: list[dict[str, Any]] = []
    left: list[dict[str, Any]] = []
    for entry in record.get("made_otherwise", []):
        for part, right in ((taken, True), (left, False)):
            rows = {name: [i for i in ids if wanted(name, i) == right] for name, ids in entry["rows"].items()}
            rows = {name: ids for name, ids in rows.items() if ids}
            if rows:
                part.append(entry | {"datasets": {name: entry["datasets"][name] for name in rows}, "rows": rows})
    if taken:
        record["made_otherwise"] = left
    return taken


def mixture(record: Mapping[str, Any] | None) -> str | None:
    """One sentence for the reader of scores when --resume force has mixed them; None when all were made alike."""
    count: dict[str, int] = {}
    changed: dict[str, None] = {}
    for entry in (record or {}).get("made_otherwise", []):
        found = list(differences(entry["settings"], record["settings"]))
        for name, ids in entry["rows"].items():
            facts = list(_changed(entry["datasets"][name], record["datasets"].get(name, {}), f"{name}."))
            if found or facts:
                count[name] = count.get(name, 0) + len(ids)
                changed |= dict.fromkeys(found + facts)
    if not count:
        return None
    parts = ", ".join(f"{n} of {name}" for name, n in count.items())
    return f"results mixed by --resume force: {parts} were made with other settings or data ({'; '.join(changed)})"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`differences` of a dataset's facts, as far as both sides have them."""
    both = [key for key in new if key in old and key not in NOT_COMPARED]
    return list(differences({k: old[k] for k in both}, {k: new[k] for k in both}, prefix))


def empty_record(paths: RunPaths) -> dict[str, Any]:
    """A record before its first segment."""
    return {
        "label": paths.label,
        "shard": None if paths.shard is None else list(paths.shard),
        "settings": {},
        "notes": [],
        "datasets": {},
        "counts": {},
        "segments": [],
        "replaced": [],
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` as JSON gives it back, so that a tuple equals the list on record; ValueError on a float not finite."""
    return json.loads(json_bytes(value))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
