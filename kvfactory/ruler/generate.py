"""Samples of any task and length, and the files they are kept in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvfactory.data.tasks import Task
from kvfactory.data.templates import ChatWrap
from kvfactory.paths import scratch_dir
from kvfactory.reports.files import json_bytes
from kvfactory.ruler import cwe, fwe, niah, qa, vt
from kvfactory.ruler.fit import Count, TooLong, fit
from kvfactory.ruler.sample import TaskMaker
from kvfactory.ruler.tasks import RULER_TASKS, get_ruler_task
from kvfactory.ruler.texts import Sources, essay_text
from kvfactory.version import __version__

# kind of task -> maker of (task, length in tokens, sources)
_MAKERS: dict[str, Callable[[str, int, Sources], TaskMaker]] = {
    "niah": lambda task, length, sources: niah.maker(task, sources),
    "vt": lambda task, length, sources: vt.maker(),
    "cwe": lambda task, length, sources: cwe.maker(length),
    "fwe": lambda task, length, sources: fwe.maker(length),
    "qa": lambda task, length, sources: _qa_maker(task, sources),
}
_QA_SOURCES = {"qa_1": "squad", "qa_2": "hotpot"}


def _qa_maker(task: str, sources: Sources) -> TaskMaker:
    name = _QA_SOURCES[task]
    try:
        return qa.maker(task, getattr(sources, name))
    except ValueError as error:
        raise ValueError(f"--{name} {error}") from error


def source_of(task_name: str) -> str | None:
    """The field of `Sources` that a task's texts come from; None for a task that is made by rule alone."""
    task = get_ruler_task(task_name).name
    if task in niah.VARIANTS:
        return "essays" if niah.VARIANTS[task].haystack == "essay" else None
    return _QA_SOURCES.get(task)


def source_facts(task_name: str, sources: Sources) -> dict[str, str]:
    """For the record: name ("own" where no path is given, never a folder above) and content hash of a task's source.

    Raises:
        ValueError: the source is not there or cannot be read.
    """
    name = source_of(task_name)
    if name is None:
        return {}
    path = getattr(sources, name)
    if name == "essays":
        sha256 = essay_text(sources).sha256
    else:
        try:
            sha256 = qa.source_sha256(path)
        except ValueError as error:
            raise ValueError(f"--{name} {error}") from error
    return {"name": "own" if path is None else path.name, "sha256": sha256}


def check_sources_read(tasks: Iterable[str], sources: Sources) -> None:
    """Refuses a source that none of the tasks reads; ValueError naming its flag, which the command lines share."""
    read = {source_of(task) for task in tasks}
    for name, flag in (("essays", "essays_dir"), ("squad", "squad"), ("hotpot", "hotpot")):
        if getattr(sources, name) is not None and name not in read:
            readers = ", ".join(task for task in RULER_TASKS if source_of(task) == name)
            raise ValueError(f"--{flag} is not read by any of the --tasks: leave it out, or add one of {readers}")


def made_from(task_name: str, seed: int, sources: Sources, wrap: ChatWrap) -> dict[str, Any]:
    """What decides a record besides the task, its length, its number and the tokenizer, for the record of a file.

    Raises:
        ValueError: as `source_facts`.
    """
    facts = {
        "version": __version__,
        "seed": seed,
        "source": source_facts(task_name, sources),
        "wrap": [wrap.kind, wrap.head, wrap.tail],
    }
    return facts | ({"vt_spelling": vt.PREFIX_SPELLING} if task_name == "vt" else {})


def maker_for(task_name: str, length: int, sources: Sources) -> TaskMaker:
    """The maker of a task's samples for prompts and answers of `length` tokens together.

    Raises:
        ValueError: an unknown task, a source that cannot be read, or a length that the task cannot have.
    """
    task = get_ruler_task(task_name)
    return _MAKERS[task.category](task.name, length, sources)


def generate_task(
    task_name: str,
    length: int,
    samples: int,
    seed: int,
    count: Count,
    sources: Sources,
    progress: Callable[[int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Records of a task, each as long as it can be without exceeding `length`.

    Record i depends on everything but `samples`, and on no other record: fewer samples are a prefix of more, and
    the same arguments give the same records on every machine.

    Args:
        length: tokens of the prompt and of the longest answer (`max_new_tokens` of the task) together.
        count: tokens of a prompt from (input, answer prefix), with whatever the chat template adds.
        progress: called with the number of records made, after each.

    Yields:
        `index`, `input`, `answer_prefix`, `outputs`, `length` (prompt as counted plus new tokens) and `depths`
        (those of the `Sample`).

    Raises:
        ValueError: an unknown task, fewer than one sample, a source that cannot be read, or a length too short for the
            task, before the first record.
    """
    task = get_ruler_task(task_name)
    if samples < 1:
        raise ValueError(f"--num_samples {samples} must be at least 1")
    maker = maker_for(task.name, length, sources)
    target = length - task.max_new_tokens
    first = None
    for index in range(samples):
        try:
            # The guess is always the first record's, so that no record depends on which others are made.
            fitted = fit(maker, _key(task, length, seed, index), count, target, first)
        except TooLong as error:
            raise ValueError(_too_short(task, length, error.tokens)) from error
        first = first or fitted
        yield {
            "index": index,
            "input": fitted.sample.input,
            "answer_prefix": fitted.sample.answer_prefix,
            "outputs": fitted.sample.outputs,
            "length": fitted.tokens + task.max_new_tokens,
            "depths": list(fitted.sample.depths),
        }
        if progress is not None:
            progress(index + 1)


def check_length(task_name: str, length: int, seed: int, count: Count, sources: Sources) -> None:
    """Refuses a length that the first record could not have, with a single count.

    Raises:
        ValueError: as `generate_task`.
    """
    task = get_ruler_task(task_name)
    maker = maker_for(task.name, length, sources)
    sample = maker.make(_key(task, length, seed, 0), maker.smallest)
    tokens = count(sample.input, sample.answer_prefix)
    if tokens + task.max_new_tokens > length:
        raise ValueError(_too_short(task, length, tokens))


def _key(task: Task, length: int, seed: int, index: int) -> str:
    return f"{seed}/{task.name}/{length}/{index}"


def _too_short(task: Task, length: int, tokens: int) -> str:
    return (
        f"--lengths {length} is too short for {task.name}: its smallest prompt has {tokens} tokens with this tokenizer "
        f"and its answer up to {task.max_new_tokens}, so it needs {tokens + task.max_new_tokens}"
    )


def write_task(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes records as JSON Lines; the file appears whole, when the last record is made, or not at all.

    Raises:
        OSError: `path` cannot be written.
    """
    with scratch_dir(path.parent) as scratch:
        with (scratch / path.name).open("wb") as file:
            for record in records:
                file.write(json_bytes(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch / path.name, path)
