"""Joining shards: `{label}.shardKofN.json` of every dataset, and their run records, become the unsharded run's files.

Example i belongs to shard i mod N, as in LongBench's own multi-process runner (`data[rank::world_size]`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvfactory.reports.files import FileLock, write_atomically
from kvfactory.reports.records import Line, effective_lines, in_order, read_lines
from kvfactory.reports.run_paths import RunPaths, split_shard
from kvfactory.reports.run_record import (
    NOT_COMPARED,
    PEAK,
    differences,
    empty_record,
    list_rows,
    load_record,
    save_record,
    set_apart,
    take_listed,
)


def shard_share(order: Sequence[str], shard: tuple[int, int] | None) -> list[str]:
    """The part of `order` that belongs to shard (K, N); all of it for None."""
    return list(order) if shard is None else list(order[shard[0] :: shard[1]])


def merge_shards(
    paths: RunPaths, orders: Mapping[str, Sequence[str]], num_shards: int | None = None, force: bool = False
) -> list[Path]:
    """Join all shards of a run; the result equals an unsharded run's, and a merge cut short can be run again.

    Shard files are removed when everything they hold is in place, shard records when no results of theirs are left.

    Args:
        paths: paths of the whole run (its `shard` is ignored).
        orders: per dataset all `_id`s in data order.
        num_shards: how many shards there must be; None for as many as are there.
        force: --resume force: shards may have been made with different settings or data. The record's are those of a
            joined record that is there, else of the shard begun last; it lists the rows of the others.

    Returns:
        The merged result files.

    Raises:
        FileInUse: a shard is still running.
        ValueError: a shard is missing or unfinished, the shards' settings or data differ, or other results are in
            the way; nothing is written then.
    """
    paths = paths.for_shard(None)
    count = _count(paths, orders)
    if num_shards not in (None, count):
        raise ValueError(
            f"--num_shards {num_shards} --merge_shards does not fit the shards of {paths.label} below {paths.folder}, "
            f"which were made with --num_shards {count}: give that number"
        )
    shards = [paths.for_shard((k, count)) for k in range(count)]
    with ExitStack() as owned:
        # result files before records, in every process, so that two of them cannot wait for each other
        for name in orders:
            for part in (paths, *shards):
                owned.enter_context(FileLock(part.results(name)))
        for part in (paths, *shards):
            owned.enter_context(FileLock(part.meta, wait=True))
        contents = {name: _join(paths, shards, name, order) for name, order in orders.items()}
        written = {name for name, content in contents.items() if content is not None}
        record = _join_records(paths, shards, orders, written, force)
        # the record first: results without one are refused, a record without results is only an unfinished run
        save_record(paths.meta, record)
        for name, content in contents.items():
            if content is not None:
                write_atomically(paths.results(name), content)
        for part in shards:
            for name in orders:
                part.results(name).unlink(missing_ok=True)
            if not any(part.results(name).exists() for name in record["datasets"]):
                part.meta.unlink(missing_ok=True)
    return [paths.results(name) for name in orders if paths.results(name).exists()]


def shard_counts(paths: RunPaths, orders: Iterable[str]) -> set[int]:
    """Every number of shards that the names of a run's files speak of."""
    counts = set()
    for folder in (paths.meta.parent, *(paths.results(name).parent for name in orders)):
        for file in folder.glob("*.json") if folder.is_dir() else ():
            label, shard = split_shard(file.stem)
            if label == paths.label and shard:
                counts.add(shard[1])
    return counts


def is_complete(paths: RunPaths, orders: Mapping[str, Sequence[str]]) -> bool:
    """Whether the files of the whole run at `paths` have a row for every example; read without owning them."""
    rows = {name: effective_lines(read_lines(paths.results(name))[0]) for name in orders}
    return all(set(rows[name]) == set(order) for name, order in orders.items())


def _count(paths: RunPaths, orders: Mapping[str, Sequence[str]]) -> int:
    """Number of shards, from the names of the files that are there."""
    counts = shard_counts(paths, orders)
    if not counts:
        raise ValueError(f"no shards of {paths.label} below {paths.folder}: there is nothing to merge")
    if len(counts) > 1:
        raise ValueError(
            f"{paths.folder} holds shards of {paths.label} from runs with --num_shards "
            f"{' and '.join(map(str, sorted(counts)))}: remove those of one run"
        )
    return counts.pop()


def _join(paths: RunPaths, shards: list[RunPaths], name: str, order: Sequence[str]) -> bytes | None:
    """Content of the merged file of one dataset; None when it is already in place."""
    lines: list[Line] = []
    absent: str | None = None
    for part in shards:
        file, share = part.results(name), set(shard_share(order, part.shard))
        found = read_lines(file)[0]
        lines += found
        ids = {line.row["_id"] for line in found}
        k, n = part.shard or (0, 1)
        if ids - share:
            raise ValueError(
                f"{file} holds _id {min(ids - share)!r}, which is not in shard {k} of {n} of this data: "
                "merge with the data, the --ids and the --max_num_examples of the run"
            )
        if share - ids and absent is None:
            what = "is missing" if not found else f"lacks {len(share - ids)} of its {len(share)} examples"
            absent = f"shard {k} of {n} on {name} {what} ({file}): run it again with --shard_id {k}, then merge"
    target = paths.results(name)
    merged = in_order(lines, order)
    if target.exists():
        present = effective_lines(read_lines(target)[0])
        if set(present) == set(order) and all(present[i].raw == line.raw for i, line in effective_lines(lines).items()):
            return None  # a merge that was killed while it removed the shards
        raise ValueError(f"{target} already holds other results than the shards beside it: move one or the other away")
    if absent:
        raise ValueError(absent)
    return merged


def _join_records(
    paths: RunPaths, shards: list[RunPaths], orders: Mapping[str, Sequence[str]], written: set[str], force: bool
) -> dict[str, Any]:
    """The merged record; ValueError when the shards were not made alike, unless `force`.

    Args:
        written: datasets whose rows this merge puts in place, all of them made by the shards.
    """
    records = _shard_records(shards, orders)
    of, joined = _joined_so_far(paths, records, force)
    take_listed(joined, lambda name, _: name in written)  # rows that were deleted, or that a merge cut short listed
    known = {segment["id"] for segment in joined["segments"]}
    for part, record in records.items():
        changed = _unlike(joined, record)
        if changed and not force:
            raise ValueError(
                f"{part.meta} and {of} were not made alike ({'; '.join(changed)}): they cannot be merged, or only with "
                "--resume force"
            )
        for entry in record.get("made_otherwise", []):
            list_rows(joined, entry, {name: ids for name, ids in entry["rows"].items() if name in written})
        if changed:
            set_apart(joined, record, {name: _done(part, name) for name in orders if name in written})
        joined["notes"] += [note for note in record["notes"] if note not in joined["notes"]]
        joined["segments"] += [s | {"shard": list(part.shard)} for s in record["segments"] if s["id"] not in known]
        joined["replaced"] += [old for old in record["replaced"] if old not in joined["replaced"]]
    for name, order in orders.items():
        with_rows = [part for part in shards if shard_share(order, part.shard)]
        if all(part in records for part in with_rows):  # else the sums are there since the merge that was cut short
            joined["counts"] |= _sums(name, [records[part] for part in with_rows])
        joined["datasets"].setdefault(name, {})["examples"] = len(order)
    return joined


def _shard_records(shards: list[RunPaths], orders: Iterable[str]) -> dict[RunPaths, dict[str, Any]]:
    """The records that are there: a shard without examples has none, nor one that an earlier merge has removed."""
    records = {}
    for part in shards:
        record = load_record(part.meta)
        if record is not None:
            records[part] = record
        elif any(part.results(name).exists() for name in orders):
            raise ValueError(f"{part.meta} is missing, so nothing says how that shard's results were made")
    return records


def _joined_so_far(
    paths: RunPaths, records: Mapping[RunPaths, dict[str, Any]], force: bool
) -> tuple[Path, dict[str, Any]]:
    """The record to add to, and the file that its settings are from: the joined one, else a shard's."""
    joined = load_record(paths.meta)
    if joined is not None:
        return paths.meta, joined
    if not records:
        raise ValueError(f"no run record of {paths.label} below {paths.meta.parent}: the shards cannot be merged")
    first = max(records, key=lambda part: records[part]["segments"][-1]["start"]) if force else next(iter(records))
    own = {key: copy.deepcopy(records[first][key]) for key in ("settings", "datasets")}
    return first.meta, empty_record(paths) | own


def _unlike(joined: dict[str, Any], record: Mapping[str, Any]) -> list[str]:
    """In what a shard's record differs from `joined`, which gets the datasets that it does not have yet."""
    changed = list(differences(joined["settings"], record["settings"]))
    for name, facts in record["datasets"].items():
        there = joined["datasets"].setdefault(name, dict(facts))
        changed += differences(_compared(there), _compared(facts), f"{name}.")
    return changed


def _sums(name: str, records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """{name: counters of one dataset of all `records` together}; {} when they have none."""
    total: dict[str, float] = {}
    for record in records:
        for key, value in record["counts"].get(name, {}).items():
            before = total.get(key, 0)
            total[key] = max(before, value) if key.startswith(PEAK) else before + value
    return {name: total} if total else {}


def _done(part: RunPaths, name: str) -> list[str]:
    """`_id`s of a shard's dataset that have a result."""
    return [i for i, line in effective_lines(read_lines(part.results(name))[0]).items() if not line.failed]


def _compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in NOT_COMPARED}
