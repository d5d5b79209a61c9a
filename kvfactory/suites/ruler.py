"""RULER: 13 synthetic tasks at any length, from our own generators or from files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.tasks import Task
from kvfactory.data.templates import OWN_CHAT_TEMPLATES, model_family, parse_thinking
from kvfactory.loading import Checkpoint, tokenizer_sha256
from kvfactory.paths import cache_dir
from kvfactory.ruler.generate import (
    check_length,
    check_sources_read,
    generate_task,
    made_from,
    source_facts,
    write_task,
)
from kvfactory.ruler.metrics import ruler_score
from kvfactory.ruler.read import locate_ruler, read_generated, read_ruler
from kvfactory.ruler.tasks import RULER_TASKS, canonical_ruler_tasks, get_ruler_task
from kvfactory.ruler.texts import Sources
from kvfactory.run_settings import RunSettings, flag, whole_numbers, words
from kvfactory.settings import whole_number
from kvfactory.suites.base import Dataset, Suite

PROTOCOLS = ("official", "anchor")
ANCHOR_NEW_TOKENS = 64
OFFICIAL_SAMPLES = 500


@dataclass(frozen=True)
class RulerSettings(RunSettings):
    """Flags of run_ruler.py."""

    program: ClassVar[str] = "run_ruler.py"
    benchmark: ClassVar[str] = "RULER"

    ruler_protocol: str = flag(
        "what",
        "official",
        "official: the task's own number of new tokens and the tokenizer's chat template with the answer prefix behind "
        "it; anchor: KVCache-Factory's 64 new tokens and bare prompts, except for Llama-2",
        choices=PROTOCOLS,
    )
    tasks: tuple[str, ...] = flag(
        "data",
        tuple(RULER_TASKS),
        "RULER tasks separated by commas, or all; default all 13",
        read=words,
        alias=("datasets", "dataset"),
    )
    lengths: tuple[int, ...] = flag(
        "data",
        (4096,),
        "context lengths in tokens, separated by commas; a prompt and its answer fit into each (default: 4096)",
        read=whole_numbers,
        alias=("context_length",),
    )
    num_samples: int | None = flag(
        "data",
        None,
        f"samples generated per task and length; default {OFFICIAL_SAMPLES}, as published",
        read=whole_number,
    )
    data_dir: str | None = flag(
        "data",
        None,
        "folder with {length}/{task}.jsonl, in either of RULER's layouts; default: generated with the model's "
        "tokenizer, seed and texts, and kept in the cache",
    )
    essays_dir: str | None = flag(
        "data", None, "folder of .txt files for haystacks of essays; default kvfactory's own text"
    )
    squad: str | None = flag("data", None, "SQuAD v2 JSON file for qa_1; default kvfactory's own documents")
    hotpot: str | None = flag("data", None, "HotpotQA distractor JSON file for qa_2; default kvfactory's own documents")
    chat_template: str = flag(
        "data",
        "auto",
        "tokenizer: wrap prompts by the tokenizer's chat template; none: bare; auto: tokenizer where there is one",
        choices=OWN_CHAT_TEMPLATES,
    )
    save_dir: str = flag("files", "./results_ruler", "folder of all results")

    def checked(self, methods: Any) -> RulerSettings:
        """See `RunSettings.checked`."""
        self.refuse_empty("data_dir", "essays_dir", "squad", "hotpot")
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"--lengths {length} must be at least 1 token")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"--num_samples {self.num_samples} must be at least 1")
        made = ("num_samples", "essays_dir", "squad", "hotpot")
        given = [name for name in made if getattr(self, name) is not None]
        if self.data_dir is not None and given:
            raise ValueError(
                f"--{given[0]} is read when samples are generated, but --data_dir {self.data_dir} gives them: leave "
                "one of the two out"
            )
        if self.ruler_protocol == "anchor" and self.chat_template != "auto":
            raise ValueError(
                f"--chat_template {self.chat_template} cannot be combined with --ruler_protocol anchor, which sets the "
                "wrap itself"
            )
        if parse_thinking(self.thinking):
            raise ValueError(
                f"--thinking {self.thinking}: RULER's prompts end with the first words of the answer, so there is no "
                "room for a thinking block; use --thinking off, with --chat_template none where a model always thinks"
            )
        tasks = canonical_ruler_tasks(self.tasks)
        check_sources_read(tasks, self.sources())
        return dataclasses.replace(super().checked(methods), tasks=tasks)

    def sources(self) -> Sources:
        """The texts that samples are generated from."""
        return Sources(*(None if path is None else Path(path) for path in (self.essays_dir, self.squad, self.hotpot)))

    def suite(self) -> Ruler:
        return Ruler(self)


class Ruler(Suite):
    """RULER (arXiv 2404.06654; NVIDIA/RULER). Prompts are never cut: one that does not fit the window is refused."""

    settings: RulerSettings
    row_fields = ("answers", "length")
    metric = "RULER's share of references found"

    def __init__(self, settings: RulerSettings):
        """Raises:
        ValueError: data files that are missing or broken, texts that cannot be read, or an `_id` of --ids that no
            dataset has.
        """
        super().__init__(settings)
        self.files: dict[tuple[int, str], Path] = {}
        self.read: dict[tuple[int, str], list[dict]] = {}
        if settings.data_dir is not None:
            self.files = locate_ruler(settings.data_dir, settings.lengths, settings.tasks)
            self.read = {key: read_ruler(file, key[1]) for key, file in self.files.items()}
            if self.ids:
                found = {record["_id"] for records in self.read.values() for record in records}
                self.ids.check_found(found, [f"{length}/{task}" for length, task in self.read])
        else:
            for task in settings.tasks:
                source_facts(task, settings.sources())
            if self.ids:
                found = {str(index) for index in range(self._samples)}
                self.ids.check_found(found, [f"{n}/{task}" for n in settings.lengths for task in settings.tasks])

    @property
    def generates(self) -> bool:
        """Whether samples are made here instead of read."""
        return self.settings.data_dir is None

    @property
    def _samples(self) -> int:
        """How many samples a task has where they are generated; their `_id`s count from 0."""
        return self.settings.num_samples or OFFICIAL_SAMPLES

    @property
    def reads_seed(self) -> bool:
        return self.generates or super().reads_seed

    def encoder(self, checkpoint: Checkpoint) -> PromptEncoder:
        """Raises:
        ValueError: a length above the model's window, or a chat template that is not there.
        """
        settings, template = self.settings, self.settings.chat_template
        if settings.ruler_protocol == "anchor":
            family = model_family(checkpoint.config, checkpoint.tokenizer)
            template = "longbench" if family == "llama2" else "none"
        encoder = PromptEncoder(
            checkpoint.tokenizer,
            checkpoint.config,
            chat_template=template,
            generation_config=checkpoint.generation_config,
            legacy_decode_cleanup=settings.legacy_decode_cleanup,
        )
        above = [length for length in settings.lengths if encoder.window is not None and length > encoder.window]
        if above:
            raise ValueError(
                f"--lengths {above[0]} is above the model's window of {encoder.window} tokens, and RULER's prompts are "
                "not cut: take shorter lengths"
            )
        return encoder

    def datasets(self, checkpoint: Checkpoint, encoder: PromptEncoder) -> list[Dataset]:
        """Raises:
        ValueError: a length too small for a task, or a prompt and its new tokens too long for the model's window.
        """
        settings = self.settings
        wanted = [(length, get_ruler_task(task)) for length in settings.lengths for task in settings.tasks]
        if not self.generates:
            return [self._read_dataset(encoder, length, task) for length, task in wanted]
        for length, task in wanted:  # all are checked before the first is generated, which can take minutes
            check_length(task.name, length, settings.seed, partial(encoder.count_whole, task), settings.sources())
        tokenizer = tokenizer_sha256(checkpoint.folder)
        return [self._generated_dataset(encoder, length, task, tokenizer) for length, task in wanted]

    def _read_dataset(self, encoder: PromptEncoder, length: int, task: Task) -> Dataset:
        sha256 = hashlib.sha256(self.files[length, task.name].read_bytes()).hexdigest()
        return self._dataset(encoder, length, task, self.read[length, task.name], {"sha256": sha256})

    def _generated_dataset(self, encoder: PromptEncoder, length: int, task: Task, tokenizer: str) -> Dataset:
        """From the cached file, which is written when it is not there or not whole."""
        settings, sources = self.settings, self.settings.sources()
        samples = self._samples
        if self.ids:
            samples = 1 + max(map(int, self.ids.lines))
        elif settings.max_num_examples is not None and settings.sample_method == "topk":
            samples = min(samples, settings.max_num_examples)
        made = made_from(task.name, settings.seed, sources, encoder.wrap) | {"tokenizer_sha256": tokenizer}
        recipe = json.dumps([made, samples], sort_keys=True)
        folder = cache_dir() / "ruler" / hashlib.sha256(recipe.encode()).hexdigest()[:16]
        path = folder / str(length) / f"{task.name}.jsonl"
        records = _read_cached(path, task.name, samples)
        if records is None:
            if not settings.quiet:
                print(f"generating {samples} samples of {task.name} at {length} tokens", file=sys.stderr, flush=True)
            count = partial(encoder.count_whole, task)
            try:
                write_task(path, generate_task(task.name, length, samples, settings.seed, count, sources))
            except OSError as error:
                raise ValueError(
                    f"the cache {cache_dir()} cannot keep {task.name} at {length} tokens ({error.strerror}): set "
                    "KVFACTORY_CACHE to a folder that can be written"
                ) from error
            records = read_ruler(path, task.name)
        # Sample i depends on neither the number of samples nor the others: a run may go on with more of them.
        return self._dataset(encoder, length, task, records, {"generated": made})

    def _dataset(
        self, encoder: PromptEncoder, length: int, task: Task, records: list[dict], origin: dict[str, Any]
    ) -> Dataset:
        settings, name = self.settings, f"{length}/{task.name}"
        records = self.choose(name, records)
        records = [record | {"task": task.name, "context_length": length} for record in records]
        new = ANCHOR_NEW_TOKENS if settings.ruler_protocol == "anchor" else task.max_new_tokens
        # Both kinds of origin are always named, so that a run cannot go on with records of the other kind.
        facts = {"sha256": None, "generated": None} | origin
        max_new = settings.max_new_tokens or new
        dataset = Dataset(name, task, records, max_new, facts | {"max_new_tokens": max_new})
        if not records:
            return dataset
        # of generated samples the tokens are known; of files they were counted by any tokenizer
        longest = max(records, key=lambda record: record["length"] if self.generates else len(record["input"]))
        try:
            self.encode(encoder, dataset, longest)
        except ValueError as error:
            where = f"--lengths {length}, task {task.name}, index {longest['index']}"
            given = "" if settings.max_new_tokens is None else f" with --max_new_tokens {max_new}"
            raise ValueError(f"{where}{given}: {error}") from error
        return dataset

    def encode(self, encoder: PromptEncoder, dataset: Dataset, record: dict) -> tuple[str, EncodedPrompt]:
        prompt = encoder.encode_whole(dataset.task, record["input"], dataset.max_new_tokens, record["answer_prefix"])
        return record["input"] + record["answer_prefix"], prompt

    def fields(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        row = {"input": record["input"], "answers": record["outputs"], "pred": pred, "length": record["length"]}
        return row | self.place(record) | {"index": record["index"], "_id": record["_id"]}

    def place(self, record: dict) -> dict[str, Any]:
        return {"dataset": record["task"], "context_length": record["context_length"]}

    def scores(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        return {"score": ruler_score(dataset.task.name, pred, record["outputs"])}

    def tags(self) -> list[str]:
        return [self.settings.ruler_protocol] if self.settings.ruler_protocol != "official" else []

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"ruler_protocol": self.settings.ruler_protocol}

    def notes(self) -> list[str]:
        if not self.generates:
            return []
        return [
            "samples are generated by kvfactory in its own words: scores are not comparable with published ones "
            "(--data_dir takes RULER's files)"
        ]

    def score_again(self, dataset: Dataset, row: dict[str, Any]) -> float:
        return ruler_score(dataset.task.name, row["pred"], row["answers"])

    def rescore(self, root: Path) -> list[str]:
        return ["eval_ruler.py", "--results_dir", str(root)]


def _read_cached(path: Path, task: str, samples: int) -> list[dict[str, Any]] | None:
    """The records of a cached file; None where there is none, or it is damaged, which is told."""
    if not path.is_file():
        return None
    try:
        return read_generated(path, task, samples)
    except ValueError as error:
        print(f"note: a cached file is damaged and is made again: {error}", file=sys.stderr, flush=True)
        return None
