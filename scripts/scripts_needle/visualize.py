"""Heat maps of finished needle runs: `python scripts/scripts_needle/visualize.py FOLDER [--value recall]`.

FOLDER is a run folder `{save_dir}/{model}_{budget}`, its folder `needle`, or the save_dir; {Label}.png and {Label}.csv
are written beside every {Label}.json. A folder of KVCache-Factory's files, one `*_results.json` a cell, or the folder
above several of those, gets {folder}.png and {folder}.csv. Exit code 0, or 2 with one sentence for what cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvfactory.needle.heat_map import write_heat_map  # noqa: E402
from kvfactory.needle.needles import Needle, new_words  # noqa: E402
from kvfactory.needle.scores import SCORES, needle_scores  # noqa: E402
from kvfactory.reports.eval_files import canonical_label, read_rows, record_value  # noqa: E402
from kvfactory.reports.run_paths import split_shard  # noqa: E402
from kvfactory.settings import whole_number  # noqa: E402
from kvfactory.streams import outlive_readers  # noqa: E402

ORIGINAL = "*_results.json"


@dataclass(frozen=True)
class Run:
    """One grid: rows as `write_heat_map` takes them, and where its files go, without extension."""

    label: str
    title: str
    rows: list[dict[str, Any]]
    target: Path
    trained_length: int | None = None


def find_runs(folder: Path) -> list[Run]:
    """Our runs below `folder`, else the original's.

    Raises:
        ValueError: no such folder, no results in it, or a file that holds none.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: give a run folder such as model_512, its needle folder, or save_dir"
        )
    folder = folder.resolve()
    below = sorted(p for p in folder.iterdir() if p.is_dir())
    places = [p for p in (folder, *below, *(p / "needle" for p in below)) if p.name == "needle" and p.is_dir()]
    files = [file for place in places for file in sorted(place.glob("*.json")) if split_shard(file.stem)[1] is None]
    if files:
        return [_read_ours(file) for file in files]
    folders = [place for place in (folder, *below) if any(place.glob(ORIGINAL))]
    if folders:
        return [_read_original(place) for place in folders]
    raise ValueError(
        f"{folder} holds no needle results: needle/{{Label}}.json is looked for in it and in its subfolders, and "
        f"KVCache-Factory's {ORIGINAL} (shards are to be merged first)"
    )


def _read_ours(path: Path) -> Run:
    found = read_rows(path)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for row in found.done:
        scores = row.get("scores")
        whole = isinstance(row.get("context_length"), int) and isinstance(row.get("depth_percent"), int)
        if not whole or not isinstance(scores, dict) or not set(SCORES) <= set(scores):
            raise ValueError(
                f"{path}: row {row['_id']!r} is no needle result, which has whole numbers context_length and "
                f"depth_percent and scores {', '.join(SCORES)}"
            )
    label = canonical_label(path.stem)
    run = path.parent.parent
    return Run(label, f"{run.name}: {label}", found.done + found.failed, path.with_suffix(""), _trained_length(path))


def _trained_length(path: Path) -> int | None:
    record = path.parent.parent / "meta" / path.name
    if not record.is_file():
        return None
    try:
        found = record_value(json.loads(record.read_text(encoding="utf-8")), "trained_length")
        return None if found is None else int(found)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the run record {record} cannot be read: {error}") from error


def _read_original(folder: Path) -> Run:
    rows = []
    for path in sorted(folder.glob(ORIGINAL)):
        try:
            cell = json.loads(path.read_text(encoding="utf-8"))
            row = {"context_length": int(cell["context_length"]), "depth_percent": round(float(cell["depth_percent"]))}
            row["scores"] = needle_scores(_original_needle(cell["needle"]), cell["model_response"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no result of KVCache-Factory's needle test ({error!r})") from error
        rows.append(row)
    return Run(folder.name, folder.name, rows, folder / folder.name)


def _original_needle(text: str) -> Needle:
    """The needle of a file that does not hold the question: what follows its first "is" is the answer.

    For the original's own needle these are the eleven words that its visualize.py looks for.
    """
    answer = text.partition(" is ")[2] or text
    return Needle("original", text.strip(), "", new_words(answer, ""))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the heat maps of needle runs and write them as tables.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="run folder, its needle folder, or save_dir")
    parser.add_argument("--value", choices=SCORES, default="recall", help="which score (default: recall)")
    parser.add_argument(
        "--trained_length",
        type=whole_number,
        help="dashed line after this many tokens (default: the run record's, if there)",
    )
    arguments = parser.parse_args(argv)
    try:
        for run in find_runs(arguments.folder):
            png, table = (run.target.with_name(run.target.name + end) for end in (".png", ".csv"))
            trained = arguments.trained_length or run.trained_length
            mean = write_heat_map(run.rows, png, table, run.title, trained, arguments.value)
            failed = sum(row.get("error") is not None for row in run.rows)
            note = f", {failed} failed" if failed else ""
            print(f"{run.label}: {arguments.value} {mean:.4f} over {len(run.rows) - failed} results{note} ({png})")
    except (ValueError, OSError) as error:
        print(f"visualize.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
