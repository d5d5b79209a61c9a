"""RULER records: where their files are, and reading and checking them.

Files are JSON Lines in UTF-8, `{data_dir}/{length}/{task}.jsonl`, in one of two layouts. The older one (and the files
that KVCache-Factory brings) has the answer prefix at the end of `input`; the current one splits it off into
`answer_prefix`. Source: NVIDIA/RULER @c3f5e3b4, scripts/data/. Neither torch nor transformers is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvfactory.data.json_lines import read_objects
from kvfactory.ruler.tasks import canonical_ruler_task, canonical_ruler_tasks

GENERATE_COMMAND = "python -m kvfactory.ruler"
_LAYOUTS = {True: "with answer_prefix", False: "without answer_prefix"}


def is_length(name: str) -> bool:
    """Whether a folder's name is a length in tokens; no leading zero, so that no two folders are of one length."""
    return re.fullmatch("[1-9][0-9]*", name) is not None


def length_folders(folder: str | Path) -> dict[int, Path]:
    """The subfolders that are named after a length in tokens, shortest first."""
    found = {int(p.name): p for p in Path(folder).iterdir() if is_length(p.name) and p.is_dir()}
    return dict(sorted(found.items()))


def locate_ruler(
    data_dir: str | Path, lengths: Iterable[int] | None, tasks: Iterable[str]
) -> dict[tuple[int, str], Path]:
    """The file of every (length, task), lengths outermost and both in the order given, repetitions dropped.

    Args:
        data_dir: folder with `{length}/{task}.jsonl`.
        lengths: in tokens; None takes every length that has a folder, shortest first.
        tasks: names as the user wrote them.

    Raises:
        ValueError: an unknown task, no such folder, or a file that is not there.
    """
    names = canonical_ruler_tasks(tasks)
    root = Path(data_dir).expanduser()
    hint = f"make the files with `{GENERATE_COMMAND}`, or pass --data_dir with a folder of {{length}}/{{task}}.jsonl."
    if not root.is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder: {hint}")
    wanted = list(dict.fromkeys(length_folders(root) if lengths is None else lengths))
    if not wanted:
        raise ValueError(f"--data_dir {data_dir} has no folder named after a length in tokens: {hint}")
    found = {(length, name): root / str(length) / f"{name}.jsonl" for length in wanted for name in names}
    missing = [f"{length}/{name}.jsonl" for (length, name), path in found.items() if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"no RULER data for {', '.join(missing[:3])}{more} in {data_dir}: {hint}")
    return found


def read_ruler(path: str | Path, task: str) -> list[dict[str, Any]]:
    """All records of one file, checked to the last line, in file order.

    Returns:
        Records with exactly `_id` (`index` as text), `index`, `input`, `answer_prefix` ("" in the older layout),
        `outputs` (list of str, at least one) and `length` (int or None). The prompt is `input + answer_prefix`.

    Fields besides the above are ignored; for lines see `read_objects`.

    Raises:
        ValueError: as `read_objects`, or the first bad line (named by file and line): a field that is missing or of a
            wrong type, no reference, an index seen before, another layout than the line before.
    """
    path, task = Path(path), canonical_ruler_task(task)
    records: list[dict[str, Any]] = []
    line_of_index: dict[int, int] = {}
    first_layout: tuple[bool, int] | None = None
    for number, data in read_objects(path, task):
        where = f"{path}, line {number}"
        record = _checked(data, where)
        first = line_of_index.setdefault(record["index"], number)
        if first != number:
            raise ValueError(f"{where}: index {record['index']} is already used on line {first}.")
        split = "answer_prefix" in data
        first_layout = first_layout or (split, number)
        if split != first_layout[0]:
            raise ValueError(
                f"{where}: a record {_LAYOUTS[split]}, but line {first_layout[1]} is one {_LAYOUTS[not split]}; a file "
                "must keep to one layout, since nothing else tells whether input already ends with the prefix."
            )
        records.append(record)
    return records


def read_generated(path: Path, task: str, samples: int) -> list[dict[str, Any]]:
    """The records of a file that the generator wrote, which are numbered from 0.

    Raises:
        ValueError: as `read_ruler`, or there are not all `samples` of them: a full disk or an edit has cut the file.
    """
    records = read_ruler(path, task)
    if [record["index"] for record in records] != list(range(samples)):
        raise ValueError(f"{path}: {len(records)} records, but it was made with {samples}, numbered from 0.")
    return records


def _checked(data: dict[str, Any], where: str) -> dict[str, Any]:
    missing = [field for field in ("index", "input", "outputs") if field not in data]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}; every record has index, input and outputs.")
    index, outputs, length = data["index"], data["outputs"], data.get("length")
    if not _whole(index):
        raise ValueError(f"{where}: index must be an integer, this is {_shown(index)}.")
    for field in ("input", "answer_prefix"):
        if not isinstance(data.get(field, ""), str):
            raise ValueError(f"{where}: {field} must be a string, this is {_shown(data[field])}.")
    if not isinstance(outputs, list) or not all(isinstance(output, str) for output in outputs):
        raise ValueError(f"{where}: outputs must be a list of strings, this is {_shown(outputs)}.")
    if not outputs or not all(output.strip() for output in outputs):
        raise ValueError(f"{where}: outputs is {_shown(outputs)}, but scoring needs references, none of them blank.")
    if length is not None and not _whole(length):
        raise ValueError(f"{where}: length must be an integer or null, this is {_shown(length)}.")
    prefix = data.get("answer_prefix", "")
    return {
        "_id": str(index),
        "index": index,
        "input": data["input"],
        "answer_prefix": prefix,
        "outputs": outputs,
        "length": length,
    }


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
