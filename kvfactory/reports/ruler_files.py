"""Finding and reading RULER result files: ours and those of KVCache-Factory, in any spelling of names.

Layout: `{model}_{budget}/{length}/{task}/{Method[+suffix]}.json`, with run records in `{model}_{budget}/meta/`.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvfactory.reports.eval_files import RunFolder, read_run, result_names, subfolders, with_results
from kvfactory.reports.records import Line, read_lines
from kvfactory.ruler.read import is_length, length_folders
from kvfactory.ruler.tasks import RULER_TASKS

Places = list[tuple[str, Path]]  # ("{length}/{task}", folder of its result files)


def find_ruler_runs(results_dir: str | Path) -> list[RunFolder]:
    """The run folder at `results_dir`, the run folders inside it, or the run folder that it is one length of.

    The files of a run are keyed `{length}/{task}`, as the datasets of its records are. From one length's folder the
    run has only that length, and its `path` is the folder given.

    Raises:
        ValueError: there is no such folder, or no result file where one is looked for, or two files of one length and
            task stand for the same method.
    """
    root = Path(results_dir)
    if not root.is_dir():
        raise ValueError(
            f"--results_dir {results_dir} is not a folder: give a run folder such as model_512, or its parent."
        )
    path = root.resolve()
    places, notes = _tasks(path)
    if places:
        if not is_length(path.name):
            raise ValueError(f"--results_dir {results_dir} holds tasks, but {path.name} is not a length in tokens.")
        run = read_run(path.parent, places, notes)
        run.path = root
        return with_results([run])
    for folders in ([root], subfolders(root)):
        found = [(folder, *_lengths(folder)) for folder in folders]
        runs = [read_run(folder, places, notes) for folder, places, notes in found if places]
        if runs:
            return with_results(runs)
    hint = " This is a task's folder: give the folder above it." if path.name.lower() in RULER_TASKS else ""
    raise ValueError(
        f"--results_dir {results_dir} holds no result files: {{length}}/{{task}}/{{Method}}.json is looked for in it "
        f"and in its subfolders.{hint}"
    )


def _tasks(folder: Path) -> tuple[Places, list[str]]:
    """Where the result files of one length's folder are, and a note on every other folder that has some."""
    places, notes = [], []
    for sub in subfolders(folder):
        if not result_names(sub):
            continue
        if sub.name.lower() in RULER_TASKS:
            places.append((f"{folder.name}/{sub.name.lower()}", sub))
        else:
            notes.append(f"{folder.name}/{sub.name}/ is ignored: it is not named after a RULER task.")
    return places, notes


def _lengths(folder: Path) -> tuple[Places, list[str]]:
    """`_tasks` over all lengths of a run folder."""
    places, notes = [], []
    for sub in length_folders(folder).values():
        more, about = _tasks(sub)
        places += more
        notes += about
    others = [sub for sub in subfolders(folder) if not is_length(sub.name) and _tasks(sub)[0]]
    return places, notes + [f"{sub.name}/ is ignored: it is not named after a length in tokens." for sub in others]


def read_ruler_lines(path: Path) -> tuple[list[Line], int]:
    """`kvfactory.reports.records.read_lines`, or, where no row has an `_id`, the same with the rows numbered from 0.

    Raises:
        ValueError: a line that is broken and not the last, or is no object, or rows with and without `_id`.
    """
    data = path.read_bytes()
    pieces = data.split(b"\n")
    lines: list[Line] = []
    whole = 0
    for number, raw in enumerate(pieces, start=1):
        if raw.strip():
            try:
                row = json.loads(raw.decode("utf-8"))
            except ValueError as error:
                if not any(piece.strip() for piece in pieces[number:]):
                    return lines, whole
                raise ValueError(f"{path} line {number} is broken ({error}): repair or delete that line.") from error
            if not isinstance(row, dict) or "_id" in row:
                return read_lines(path)  # its messages fit the rows that have one
            lines.append(Line(number, raw, {"_id": str(len(lines)), **row}))
        whole = min(whole + len(raw) + 1, len(data))
    return lines, len(data)
