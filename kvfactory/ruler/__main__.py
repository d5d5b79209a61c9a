"""Make RULER files with a model's tokenizer: `python -m kvfactory.ruler --model_path MODEL --lengths 4096,8192`.

Writes {output}/{length}/{task}.jsonl and beside it {task}.meta.json, which says from what it was made. A file that is
there already and was made from the same is kept, so that a killed call goes on where it stopped.

Exit codes: 0 all files are there; 2 refused (one sentence says why).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvfactory.assets import resolve_model
from kvfactory.data.encode import PromptEncoder
from kvfactory.data.templates import OWN_CHAT_TEMPLATES
from kvfactory.ruler.generate import check_length, check_sources_read, generate_task, made_from, write_task
from kvfactory.ruler.read import read_generated
from kvfactory.ruler.tasks import RULER_TASKS, canonical_ruler_tasks, get_ruler_task
from kvfactory.ruler.texts import Sources
from kvfactory.settings import whole_number


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.ruler", description="Make RULER data files.")
    add = parser.add_argument
    add("--model_path", required=True, help="whose tokenizer counts: local folder, hub id, or smollm2; no weights")
    add("--lengths", required=True, help="tokens of prompt and answer together, comma-separated, e.g. 4096,8192")
    add("--tasks", default="all", help=f"comma-separated, or all (default): {', '.join(RULER_TASKS)}")
    add(
        "--chat_template",
        default="auto",
        choices=OWN_CHAT_TEMPLATES,
        help="the wrap whose tokens are counted, as in run_ruler.py: the tokenizer's template, none, or auto: the "
        "template where there is one (default: auto)",
    )
    add("--num_samples", type=whole_number, default=500, metavar="N", help="per task and length (default: 500)")
    add("--output", type=_path, default=Path("data/RULER"), help="folder to write to (default: data/RULER)")
    add(
        "--essays_dir", type=_path, metavar="PATH", help="folder of .txt files or one text file (default: our own text)"
    )
    add("--squad", type=_path, metavar="FILE", help="SQuAD v2 JSON for qa_1 (default: our own questions)")
    add("--hotpot", type=_path, metavar="FILE", help="HotpotQA distractor JSON for qa_2 (default: our own questions)")
    add("--seed", type=whole_number, default=42, metavar="N", help="of all samples (default: 42)")
    add("--overwrite", action="store_true", help="replace files that were made from something else")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def parse_lengths(text: str) -> list[int]:
    """Token counts from comma-separated text, in the order given; ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    # 18 digits are more than any window, and Python refuses to read thousands
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths {text!r} must be positive token counts, comma-separated, e.g. 4096,8192")
    return list(dict.fromkeys(map(int, parts)))


def _path(text: str) -> Path:
    """A path; ArgumentTypeError for an empty one, which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: leave the flag out, or give one")
    return Path(text)


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a local folder, a hub id or a bundled model.

    Raises:
        ValueError: there is none, or it cannot be had.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of prompts that are longer than the model's window
    try:
        return AutoTokenizer.from_pretrained(resolve_model(model_path))
    except Exception as error:  # the Rust library raises bare Exception for a broken tokenizer.json
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"--model_path {model_path}: no tokenizer can be loaded from it ({why})") from error


def vocabulary_sha256(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary, which is the same under every version of transformers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def run(options: argparse.Namespace) -> None:
    """Makes the files that are not there yet.

    Raises:
        ValueError: one sentence naming the flag, the value and what is accepted.
    """
    lengths, tasks = parse_lengths(options.lengths), canonical_ruler_tasks(options.tasks.split(","))
    if options.num_samples < 1:
        raise ValueError(f"--num_samples {options.num_samples} must be at least 1")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed {options.seed} is not a whole number from 0 to {2**32 - 1}, as run_ruler.py takes")
    sources = Sources(options.essays_dir, options.squad, options.hotpot)
    check_sources_read(tasks, sources)
    tokenizer = load_tokenizer(options.model_path)
    encoder = PromptEncoder(tokenizer, None, chat_template=options.chat_template)
    counts = {task: partial(encoder.count_whole, get_ruler_task(task)) for task in tasks}
    common = {"num_samples": options.num_samples, "vocabulary_sha256": vocabulary_sha256(tokenizer)}
    records = {task: common | made_from(task, options.seed, sources, encoder.wrap) for task in tasks}
    wanted = [(length, task, options.output / str(length) / f"{task}.jsonl") for length in lengths for task in tasks]
    missing = [item for item in wanted if options.overwrite or not _is_made(item[2], records[item[1]])]
    for length, task, _ in missing:
        check_length(task, length, options.seed, counts[task], sources)
    total = len(missing) * options.num_samples
    interval = 0.5 if sys.stderr.isatty() else 30
    with tqdm(total=total, desc="ruler", unit="sample", disable=options.quiet, mininterval=interval) as bar:
        for length, task, path in missing:
            bar.set_postfix_str(f"{task} {length}", refresh=False)
            path.unlink(missing_ok=True)  # the record comes first, so a file that is there is what its record says
            write_task(_meta(path), [records[task]])
            samples = (options.num_samples, options.seed, counts[task], sources)
            write_task(path, generate_task(task, length, *samples, progress=lambda made: bar.update()))
    print(f"{len(missing)} files made, {len(wanted) - len(missing)} were there: {options.output}")


def _meta(path: Path) -> Path:
    return path.with_name(f"{path.stem}.meta.json")


def _is_made(path: Path, record: dict[str, Any]) -> bool:
    """Whether the file is there and was made from what `record` says; ValueError when it differs or is damaged."""
    if not path.exists():
        return False
    try:
        found = json.loads(_meta(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == record:
        try:
            read_generated(path, path.stem, record["num_samples"])
        except ValueError as error:
            raise ValueError(f"a file that is there is damaged, use --overwrite or delete it: {error}") from error
        return True
    known = found if isinstance(found, dict) else {}
    differs = ", ".join(name for name in record if known.get(name) != record[name])
    raise ValueError(
        f"{path} is there and was made from something else ({differs}): use --overwrite or another --output"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    options = build_parser().parse_args(argv)
    try:
        run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --output {options.output} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # An exit through SystemExit removes the scratch folder; the default action of the signal would not.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
