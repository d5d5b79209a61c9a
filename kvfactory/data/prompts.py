"""Prompt texts: LongBench's own, read at run time, or kvfactory's wording where those files are absent.

LongBench keeps its texts in `config/dataset2prompt.json` and its generation limits in `config/dataset2maxlen.json`
(THUDM/LongBench, LongBench/config/). They are never copied into this project: they come from the data folder or from
the download cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvfactory.data.longbench import DEFAULT_DATA_DIR, longbench_cache
from kvfactory.data.own_prompts import OWN_PROMPTS
from kvfactory.data.tasks import TASKS, canonical_dataset, get_task

PROMPT_FILE = "dataset2prompt.json"
MAXLEN_FILE = "dataset2maxlen.json"
PLACEHOLDERS = ("context", "input")
# Hashes of the files' content at the pinned commit (`download.OFFICIAL_COMMIT`), by `content_sha256`.
OFFICIAL_SHA256 = {
    PROMPT_FILE: "2132ae70b413e48c8bc02ea5f8f4a2c66a36fff8b826935ba3baf057ffdf9ba8",
    MAXLEN_FILE: "637dc91fa91ac84703fedc5e1a5a57030164e3cc9229d4428e75d46a8f260dd8",
}
# How LongBench's prompts begin: characters in front of the first placeholder, less blanks around and at most HEAD, and
# 16 digits of their SHA-256. It tells contexts that are prompts already where the prompt files are not at hand.
HEAD = 36
OFFICIAL_HEADS: dict[str, tuple[int, str]] = {
    "narrativeqa": (36, "758bff49b14b3eb5"),
    "qasper": (36, "468df7601f052d3f"),
    "multifieldqa_en": (36, "4313ea12f83e09ca"),
    "multifieldqa_zh": (15, "b6cf7b6fa9acff07"),
    "hotpotqa": (36, "705953104758b494"),
    "2wikimqa": (36, "705953104758b494"),
    "musique": (36, "705953104758b494"),
    "dureader": (20, "7a51f950ebcbde04"),
    "gov_report": (36, "3feb5a9ba716cf18"),
    "qmsum": (36, "4777849fd84c67db"),
    "multi_news": (36, "5565eafb981b8deb"),
    "vcsum": (36, "94e4104d52b8f359"),
    "trec": (36, "de9b0eb76805674a"),
    "triviaqa": (36, "705953104758b494"),
    "samsum": (36, "db23ecfe1b1d9d9f"),
    "lsht": (19, "d37a5331acd58869"),
    "passage_count": (36, "448cd7842205aa09"),
    "passage_retrieval_en": (36, "8db05ee0686b9d47"),
    "passage_retrieval_zh": (36, "4c581097727f03c8"),
    "lcc": (36, "1f34070b47a98255"),
    "repobench-p": (36, "1f34070b47a98255"),
}


def content_sha256(content: object) -> str:
    """SHA-256 of a JSON value itself, so that indentation, key order and escapes of a file cannot matter."""
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class PromptSet:
    """Prompt texts by dataset name without `_e`.

    Attributes:
        source: "longbench" (read from LongBench's files) or "kvfactory" (our wording; scores do not compare with
            published ones).
        sha256: `content_sha256` of all texts of the source.
        path: the file they were read from; None for "kvfactory".
    """

    texts: dict[str, str]
    source: str
    sha256: str
    path: Path | None = None

    @property
    def official(self) -> bool:
        """Whether the whole prompt file is LongBench's, unedited, at the pinned commit."""
        return self.sha256 == OFFICIAL_SHA256[PROMPT_FILE]

    def render(self, dataset: str, record: dict) -> str:
        """The prompt of one record, never stripped; braces inside the record stay as they are."""
        text = self.texts[get_task(dataset).name]
        return text.format(context=record["context"], input=record["input"])

    def begins(self, dataset: str, context: str) -> bool:
        """Whether a context begins as its prompt does, in this wording or LongBench's: then it is a prompt already."""
        name, context = get_task(dataset).name, context.lstrip()
        head = next(string.Formatter().parse(self.texts[name]))[0].strip()[:HEAD]
        length, sha256 = OFFICIAL_HEADS[name]
        official = hashlib.sha256(context[:length].encode("utf-8", "surrogatepass")).hexdigest()[:16] == sha256
        return official or (head != "" and context.startswith(head))


def load_prompts(data_dir: str | Path | None, datasets: Iterable[str]) -> PromptSet:
    """The prompts for `datasets`: {data_dir}/config, else the download cache, else our own wording.

    Args:
        data_dir: the runner's --data_dir; None stands for data/LongBench under the working directory.

    Raises:
        ValueError: a prompt file is there but unreadable, lacks a wanted dataset, has a placeholder other than
            {context} and {input}, or comes with generation limits that differ from the task table.
    """
    names = list(dict.fromkeys(canonical_dataset(name) for name in datasets))
    base = DEFAULT_DATA_DIR if data_dir is None else Path(os.path.expanduser(data_dir))
    for folder in (base / "config", longbench_cache() / "config"):
        path = folder / PROMPT_FILE
        if path.is_file():
            texts = _checked_prompts(path, names)
            if (folder / MAXLEN_FILE).is_file():
                _check_limits(folder / MAXLEN_FILE, names)
            return PromptSet(texts, "longbench", content_sha256(texts), path)
    return PromptSet(dict(OWN_PROMPTS), "kvfactory", content_sha256(OWN_PROMPTS))


def _read_object(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object with a key per dataset.")
    return content


def _checked_prompts(path: Path, names: list[str]) -> dict[str, str]:
    texts = _read_object(path)
    for name in names:
        task = get_task(name).name
        if task not in texts:
            raise ValueError(f"{path} has no prompt for dataset {task}; it has {', '.join(texts) or 'none'}.")
        _check_prompt(texts[task], f"{path}: the prompt of {task}")
    return texts


def _check_prompt(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} must be a string.")
    try:
        fields = [(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(text)]
    except ValueError as error:
        raise ValueError(f"{what} is not a str.format template ({error}).") from error
    used = [field for field in fields if field[0] is not None]
    wrong = sorted({name for name, spec, conversion in used if name not in PLACEHOLDERS or spec or conversion})
    if wrong:
        raise ValueError(f"{what} has the placeholder {{{wrong[0]}}}; only {{context}} and {{input}} can be filled.")
    if "context" not in [name for name, _, _ in used]:
        raise ValueError(f"{what} has no {{context}}, so the model would never see the text.")


def _check_limits(path: Path, names: list[str]) -> None:
    limits = _read_object(path)
    for name in names:
        task = get_task(name)
        if limits.get(task.name) != task.max_new_tokens:
            raise ValueError(
                f"{path} gives {task.name} {limits.get(task.name)!r} new tokens, the task table of kvfactory has "
                f"{task.max_new_tokens}; use LongBench's own file, and --max_new_tokens to change the limit."
            )


assert set(OWN_PROMPTS) == set(TASKS), "every dataset has a prompt of our own"
