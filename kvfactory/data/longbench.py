"""LongBench records: where their files are, reading and checking them, and choosing which ones to run.

The format is the benchmark's own (THUDM/LongBench, data.zip): JSON Lines in UTF-8, one object a line with the eight
fields below. Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvfactory.data.json_lines import kind, read_objects
from kvfactory.data.tasks import canonical_dataset
from kvfactory.paths import cache_dir

T = TypeVar("T")

DEFAULT_DATA_DIR = Path("data") / "LongBench"
DOWNLOAD_COMMAND = "python -m kvfactory.data download"
SAMPLE_METHODS = ("topk", "random")

FIELDS: dict[str, str] = {
    "input": "a string",
    "context": "a string",
    "answers": "a list of strings",
    "length": "an integer",
    "dataset": "a string",
    "language": "a string",
    "all_classes": "a list of strings or null",
    "_id": "a string",
}


def longbench_cache() -> Path:
    """Folder that `python -m kvfactory.data download` fills with {dataset}.jsonl and config/."""
    return cache_dir() / "LongBench"


def sample_dir() -> Path:
    """The bundled sample suite of a source checkout (data/sample); ValueError where there is no checkout."""
    folder = Path(__file__).resolve().parents[2] / "data" / "sample"
    if not any(folder.glob("*.jsonl")):
        raise ValueError(
            f"the bundled sample suite is not at {folder}: it is part of a source checkout, not of an installed "
            "package, so run from a clone or pass --data_dir."
        )
    return folder


def locate_data(data_dir: str | Path | None, datasets: Iterable[str]) -> dict[str, Path]:
    """The file of every dataset, keyed by its canonical name.

    Args:
        data_dir: folder with {dataset}.jsonl files; nothing else is tried when it is given. None tries
            data/LongBench under the working directory, then the download cache, each dataset on its own.
        datasets: names as the user wrote them (LongBench-E names end in `_e`).

    Raises:
        ValueError: an unknown dataset, or one without a file.
    """
    names = list(dict.fromkeys(canonical_dataset(name) for name in datasets))
    if data_dir is not None:
        places = [Path(os.path.expanduser(data_dir))]
        if not places[0].is_dir():
            raise ValueError(f"--data_dir {data_dir} is not a folder; it must hold one {{dataset}}.jsonl per dataset.")
    else:
        places = [DEFAULT_DATA_DIR, longbench_cache()]
    found = {}
    for name in names:
        file = next((p / f"{name}.jsonl" for p in places if (p / f"{name}.jsonl").is_file()), None)
        if file is None:
            raise ValueError(
                f"no data for dataset {name}: {name}.jsonl is not in {' nor in '.join(map(str, places))}; "
                f"run `{DOWNLOAD_COMMAND}` once, or pass --data_dir with a folder that holds it."
            )
        found[name] = file
    return found


def read_dataset(path: str | Path, dataset: str) -> list[dict]:
    """All records of one file, checked to the last line, with the eight official fields and no others.

    An empty answer list is accepted; for lines see `read_objects`.

    Raises:
        ValueError: as `read_objects`, or the first bad line (named by file and line): a missing field, a field of a
            wrong type, an `_id` seen before.
    """
    path = Path(path)
    records: list[dict] = []
    line_of_id: dict[str, int] = {}
    for number, found in read_objects(path, dataset):
        where = f"{path}, line {number}"
        record = check_record(found, where)
        first = line_of_id.setdefault(record["_id"], number)
        if first != number:
            raise ValueError(f"{where}: _id {record['_id']!r} is already used on line {first}.")
        records.append(record)
    return records


def check_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The eight official fields of a record; ValueError beginning with `where` for one that lacks or has them wrong."""
    missing = [field for field in FIELDS if field not in record]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; every record has the fields {', '.join(FIELDS)}.")
    for field, expected in FIELDS.items():
        if not _is(record[field], expected):
            raise ValueError(f"{where}: {field} must be {expected}, this is {kind(record[field])}.")
    return {field: record[field] for field in FIELDS}


def _is(value: object, expected: str) -> bool:
    if expected == "a string":
        return isinstance(value, str)
    if expected == "an integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if value is None:
        return expected.endswith("or null")
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def choose_examples(
    records: Sequence[dict[str, Any]],
    max_num_examples: int | None,
    sample_method: str,
    seed: int,
    dataset: str,
    ids: Container[str] | None = None,
) -> list[dict[str, Any]]:
    """At most `max_num_examples` records (None: all) of those whose `_id` is in `ids` (None: all), in data order.

    "topk" takes the first ones. "random" draws from a generator seeded by (seed, canonical name of the dataset),
    so the choice does not depend on which datasets ran before.
    """
    if sample_method not in SAMPLE_METHODS:
        raise ValueError(f"--sample_method {sample_method!r} is unknown; accepted: {', '.join(SAMPLE_METHODS)}.")
    if ids is not None:
        records = [record for record in records if record["_id"] in ids]
    if max_num_examples is None:
        return list(records)
    if max_num_examples < 1:
        raise ValueError(f"--max_num_examples {max_num_examples} must be at least 1; leave it out to run all examples.")
    if max_num_examples >= len(records):
        return list(records)
    if sample_method == "topk":
        return list(records[:max_num_examples])
    # A string seed goes through SHA-512 in `random`, so it is the same in every process and Python version.
    generator = random.Random(f"{seed}:{dataset}")
    return [records[i] for i in sorted(generator.sample(range(len(records)), max_num_examples))]


def shard(records: Sequence[T], num_shards: int, shard_id: int) -> list[T]:
    """The records i with i mod `num_shards` == `shard_id`, in data order."""
    if num_shards < 1:
        raise ValueError(f"--num_shards {num_shards} must be at least 1.")
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"--shard_id {shard_id} must be from 0 to {num_shards - 1} with --num_shards {num_shards}.")
    return list(records[shard_id::num_shards])
