"""LongBench records out of a data set of the hub, or of a local folder in the hub's layout (--hf_dataset).

Such copies hold one config per LongBench set. Their files are fetched first, as any files of the hub, and `datasets`
then reads the local folder: a loading script is never run, and the commit that was read is known. Many copies are
none that LongBench's prompts fit: their `context` begins with the prompt already, and the question is in a column of
another name (Xnhyacinth/LongBench); both are refused.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfactory.data.longbench import DOWNLOAD_COMMAND, FIELDS, check_record
from kvfactory.data.prompts import PromptSet

WITH_SCRIPT = ("thudm/longbench", "zai-org/longbench")
SPLIT = "test"


@dataclass(frozen=True)
class HubDataset:
    """A data set whose files are on this machine.

    Attributes:
        given: the flag's value, for messages.
        id: hub id; None for a local folder, whose records are known by their hash wherever they lie.
        revision: the hub's commit, None for a local folder.
    """

    given: str
    id: str | None
    revision: str | None
    folder: Path


def open_hub_dataset(given: str) -> HubDataset:
    """The data set at a local folder, or at `organisation/name` or `organisation/name@revision` on the hub.

    Raises:
        ValueError: not there, not to be had from the hub, or made by a loading script.
    """
    path = Path(os.path.expanduser(given))
    if path.is_dir():
        return _without_script(HubDataset(given, None, None, path.resolve()))
    name, _, revision = given.partition("@")
    if path.exists() or given[0] in "./~" or name.count("/") > 1:
        what = "is a file" if path.exists() else "does not exist"
        raise ValueError(f"--hf_dataset {given} {what}: give a hub id (organisation/name), or a local folder")
    if name.lower() in WITH_SCRIPT:
        raise ValueError(
            f"--hf_dataset {given} is LongBench itself, which `datasets` reads by a loading script alone, and none is "
            f"run: `{DOWNLOAD_COMMAND}` fetches its records, and runs without --hf_dataset find them"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision or None))
    except Exception as error:  # of the hub client and its HTTP library, with no base class in common
        raise ValueError(
            f"--hf_dataset {given} is no local folder and could not be had from the hub ({_line(error)}): check the "
            "id, the network and the access rights, or give a local folder"
        ) from error
    return _without_script(HubDataset(given, name, folder.name, folder))


def _without_script(source: HubDataset) -> HubDataset:
    script = f"{(source.id or source.folder.name).rpartition('/')[2]}.py"
    if (source.folder / script).is_file():
        raise ValueError(
            f"--hf_dataset {source.given} holds the loading script {script}, and none is run: give a copy that holds "
            "its records as files, e.g. parquet"
        )
    return source


def read_hub_dataset(source: HubDataset, dataset: str, prompts: PromptSet) -> list[dict[str, Any]]:
    """All records of the config `dataset`, with the eight official fields and no others; checked to the last row.

    Args:
        prompts: with which the records are to be run.

    Raises:
        ValueError: no such config, none or several splits without one named test, no rows, or the first bad row: a
            missing field, a field of a wrong type, an `_id` seen before, a context that begins as the prompt does.
    """
    records: list[dict[str, Any]] = []
    row_of_id: dict[str, int] = {}
    for number, row in enumerate(_rows(source, dataset), start=1):
        where = f"--hf_dataset {source.given}, {dataset}, row {number}"
        lacking = [name for name in FIELDS if name not in row]
        if lacking:
            raise ValueError(
                f"{where}: no {', '.join(lacking)} among its columns ({', '.join(row)}); LongBench's records have "
                f"{', '.join(FIELDS)}, and other copies do not fit its prompts"
            )
        record = check_record(row, where)
        if prompts.begins(dataset, record["context"]):
            raise ValueError(
                f"{where}: context begins with the prompt itself ({record['context'][:40]!r}), which the model would "
                "see twice: give a copy with LongBench's own contexts"
            )
        first = row_of_id.setdefault(record["_id"], number)
        if first != number:
            raise ValueError(f"{where}: _id {record['_id']!r} is already used in row {first}.")
        records.append(record)
    if not records:
        raise ValueError(f"--hf_dataset {source.given}, {dataset}: no rows")
    return records


def _rows(source: HubDataset, dataset: str) -> Iterator[dict[str, Any]]:
    """Rows as `datasets` gives them, streamed, so that no converted copy of them is left in its cache."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # its errors come as exceptions as well
    folder = str(source.folder)
    what = f"--hf_dataset {source.given}"
    try:
        configs = datasets.get_dataset_config_names(folder)
        splits = datasets.load_dataset(folder, dataset, streaming=True) if dataset in configs else {}
    except Exception as error:  # its own, those of its readers and of its YAML parser
        raise ValueError(f"{what} cannot be read as a data set ({_line(error)})") from error
    if dataset not in configs:
        raise ValueError(
            f"{what} has no config {dataset}, only {', '.join(configs)}; each set must be a config of its own name"
        )
    split = SPLIT if SPLIT in splits else next(iter(splits))
    if split != SPLIT and len(splits) > 1:
        raise ValueError(f"{what}, {dataset}: several splits ({', '.join(splits)}), none of them {SPLIT}")
    try:
        yield from splits[split]
    except Exception as error:
        raise ValueError(f"{what}, {dataset} cannot be read ({_line(error)})") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".").removesuffix(": ")
