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
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvfactory.assets import resolve_model
from kvfactory.ruler.fit import Count
from kvfactory.ruler.generate import check_length, generate_task, source_facts, source_of, write_task
from kvfactory.ruler.tasks import RULER_TASKS, canonical_ruler_task
from kvfactory.ruler.texts import Sources
from kvfactory.ruler.vt import PREFIX_SPELLING
from kvfactory.version import __version__


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.ruler", description="Make RULER data files.")
    add = parser.add_argument
    add("--model_path", required=True, help="whose tokenizer counts: local folder, hub id, or smollm2; no weights")
    add("--lengths", required=True, help="tokens of prompt and answer together, comma-separated, e.g. 4096,8192")
    add("--tasks", default="all", help=f"comma-separated, or all (default): {', '.join(RULER_TASKS)}")
    add("--num_samples", type=int, default=500, metavar="N", help="per task and length (default: 500)")
    add("--output", type=Path, default=Path("data/RULER"), help="folder to write to (default: data/RULER)")
    add("--essays_dir", type=Path, metavar="PATH", help="folder of .txt files or one text file (default: our own text)")
    add("--squad", type=Path, metavar="FILE", help="SQuAD v2 JSON for qa_1 (default: our own questions)")
    add("--hotpot", type=Path, metavar="FILE", help="HotpotQA distractor JSON for qa_2 (default: our own questions)")
    add("--seed", type=int, default=42, metavar="N", help="of all samples (default: 42)")
    add("--overwrite", action="store_true", help="replace files that were made from something else")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def parse_lengths(text: str) -> list[int]:
    """Token counts from comma-separated text, in the order given; ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths {text!r} must be positive token counts, comma-separated, e.g. 4096,8192")
    return list(dict.fromkeys(map(int, parts)))


def parse_tasks(text: str) -> list[str]:
    """Canonical task names from comma-separated text or "all"; ValueError with near matches for an unknown one."""
    if text.strip().lower() == "all":
        return list(RULER_TASKS)
    return list(dict.fromkeys(canonical_ruler_task(part) for part in text.split(",")))


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


def prompt_counter(tokenizer: Any) -> Count:
    """How many tokens a prompt has, with the special tokens that the tokenizer adds."""
    return lambda text, prefix: len(tokenizer(text + prefix)["input_ids"])


def vocabulary_sha256(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary, which is the same under every version of transformers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def run(options: argparse.Namespace) -> None:
    """Makes the files that are not there yet.

    Raises:
        ValueError: one sentence naming the flag, the value and what is accepted.
    """
    lengths, tasks = parse_lengths(options.lengths), parse_tasks(options.tasks)
    if options.num_samples < 1:
        raise ValueError(f"--num_samples {options.num_samples} must be at least 1")
    sources = Sources(options.essays_dir, options.squad, options.hotpot)
    _check_sources_read(tasks, sources)
    tokenizer = load_tokenizer(options.model_path)
    common = {
        "version": __version__,
        "seed": options.seed,
        "num_samples": options.num_samples,
        "vocabulary_sha256": vocabulary_sha256(tokenizer),
        "prompts": "own",
    }
    made_from = {task: {**common, **_task_facts(task, sources)} for task in tasks}
    wanted = [(length, task, options.output / str(length) / f"{task}.jsonl") for length in lengths for task in tasks]
    missing = [item for item in wanted if options.overwrite or not _is_made(item[2], made_from[item[1]])]
    count = prompt_counter(tokenizer)
    for length, task, _ in missing:
        check_length(task, length, options.seed, count, sources)
    total = len(missing) * options.num_samples
    interval = 0.5 if sys.stderr.isatty() else 30
    with tqdm(total=total, desc="ruler", unit="sample", disable=options.quiet, mininterval=interval) as bar:
        for length, task, path in missing:
            bar.set_postfix_str(f"{task} {length}", refresh=False)
            path.unlink(missing_ok=True)  # the record comes first, so a file that is there is what its record says
            write_task(_meta(path), [made_from[task]])
            write_task(
                path,
                generate_task(
                    task, length, options.num_samples, options.seed, count, sources, lambda made: bar.update()
                ),
            )
    print(f"{len(missing)} files made, {len(wanted) - len(missing)} were there: {options.output}")


def _task_facts(task: str, sources: Sources) -> dict[str, Any]:
    facts: dict[str, Any] = {"sources": source_facts(task, sources)}
    return {**facts, "vt_spelling": PREFIX_SPELLING} if task == "vt" else facts


def _check_sources_read(tasks: list[str], sources: Sources) -> None:
    read = {source_of(task) for task in tasks}
    for name, flag in (("essays", "essays_dir"), ("squad", "squad"), ("hotpot", "hotpot")):
        if getattr(sources, name) is not None and name not in read:
            readers = ", ".join(task for task in RULER_TASKS if source_of(task) == name)
            raise ValueError(f"--{flag} is not read by any of the --tasks: leave it out, or add one of {readers}")


def _meta(path: Path) -> Path:
    return path.with_name(f"{path.stem}.meta.json")


def _is_made(path: Path, made_from: dict[str, Any]) -> bool:
    """Whether the file is there and was made from the same; ValueError when it is there and differs."""
    if not path.exists():
        return False
    try:
        found = json.loads(_meta(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == made_from:
        return True
    known = found if isinstance(found, dict) else {}
    differs = ", ".join(name for name in made_from if known.get(name) != made_from[name])
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
