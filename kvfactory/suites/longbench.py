"""LongBench and LongBench-E."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.hub_dataset import open_hub_dataset, read_hub_dataset
from kvfactory.data.longbench import locate_data, read_dataset
from kvfactory.data.prompts import PromptSet, content_sha256, load_prompts
from kvfactory.data.tasks import DEFAULT_DATASETS, LONGBENCH_E, TASKS, canonical_dataset, get_task
from kvfactory.data.templates import CHAT_TEMPLATES, PROTOCOLS
from kvfactory.loading import Checkpoint
from kvfactory.metrics import score_example
from kvfactory.run_settings import RunSettings, flag, words
from kvfactory.settings import whole_number
from kvfactory.suites.base import Dataset, Suite

assert not set(TASKS) & set(LONGBENCH_E)


@dataclass(frozen=True)
class LongBenchSettings(RunSettings):
    """Flags of run_longbench.py."""

    program: ClassVar[str] = "run_longbench.py"
    benchmark: ClassVar[str] = "LongBench"

    protocol: str = flag(
        "what",
        "longbench",
        "everything between record and score: longbench is the benchmark's own, factory the original runner's",
        choices=PROTOCOLS,
    )
    datasets: tuple[str, ...] = flag(
        "data",
        DEFAULT_DATASETS,
        "LongBench names separated by commas (LongBench-E sets end in _e), or all: the 21 sets; default the 16 "
        "English and code sets",
        read=words,
        alias=("dataset",),
    )
    data_dir: str | None = flag(
        "data",
        None,
        "folder with {dataset}.jsonl, and config/ with LongBench's prompt files; default data/LongBench, then the "
        "cache that `python -m kvfactory.data download` fills",
    )
    hf_dataset: str | None = flag(
        "data",
        None,
        "records out of this data set instead, with a config per LongBench name: a hub id, organisation/name or "
        "organisation/name@revision, or a local folder; it must have LongBench's eight fields and its own contexts; no "
        "loading script is run",
        metavar="ID",
    )
    chat_template: str = flag(
        "data",
        "longbench",
        "longbench: the benchmark's strings for Llama-2 and Llama-3, Mistral bare, other instruct models through "
        "their tokenizer's template; tokenizer: that template for all; none: bare prompts",
        choices=CHAT_TEMPLATES,
    )
    force_chat: bool = flag("data", False, "wrap the few-shot and code sets as well")
    max_input_length: int | None = flag(
        "data",
        None,
        "longest prompt in tokens before the chat wrap, longer ones are cut in the middle; default by the window",
        read=whole_number,
    )
    stop_newline: tuple[str, ...] = flag(
        "data", (), "datasets that stop at a newline besides samsum, separated by commas", read=words
    )
    min_one_token: str = flag("data", "samsum", "where the first new token is never a stop", choices=("samsum", "all"))
    save_dir: str = flag("files", "./results_long_bench", "folder of all results")
    save_context: bool = flag("files", False, "store each record's context")

    def checked(self, methods: Any) -> LongBenchSettings:
        """See `RunSettings.checked`."""
        self.refuse_empty("data_dir", "hf_dataset")
        if self.data_dir is not None and self.hf_dataset is not None:
            raise ValueError(
                f"--data_dir {self.data_dir} and --hf_dataset {self.hf_dataset} both give the records: leave one out"
            )
        return dataclasses.replace(
            super().checked(methods),
            datasets=_canonical(self.datasets),
            stop_newline=tuple(sorted({get_task(name).name for name in self.stop_newline})),
        )

    def suite(self) -> LongBench:
        return LongBench(self)


def _canonical(names: tuple[str, ...]) -> tuple[str, ...]:
    if [name.lower() for name in names] == ["all"]:
        return tuple(TASKS)
    return tuple(dict.fromkeys(canonical_dataset(name) for name in names))


class LongBench(Suite):
    """Records of THUDM/LongBench's format under its own protocol, or the original runner's."""

    settings: LongBenchSettings
    row_fields = ("answers", "all_classes", "length")
    metric = "LongBench's metrics"
    label_fields = ("chat_template", "force_chat", "max_input_length", "stop_newline", "min_one_token")

    def __init__(self, settings: LongBenchSettings):
        """Raises:
        ValueError: data, prompt or id files that are missing or broken, or an answer that cannot be scored.
        """
        super().__init__(settings)
        self.prompts = load_prompts(settings.data_dir, settings.datasets)
        self.sources = _read_files(settings) if settings.hf_dataset is None else _read_hub(settings, self.prompts)
        self.chosen = {name: self.choose(name, source.records) for name, source in self.sources.items()}
        if self.ids:
            found = {record["_id"] for source in self.sources.values() for record in source.records}
            self.ids.check_found(found, self.sources)
        for name, source in self.sources.items():
            _check_scorable(name, source.where, self.chosen[name])

    def encoder(self, checkpoint: Checkpoint) -> PromptEncoder:
        """Raises:
        ValueError: as `PromptEncoder`, or a prompt limit beyond the model's window.
        """
        settings = self.settings
        encoder = PromptEncoder(
            checkpoint.tokenizer,
            checkpoint.config,
            protocol=settings.protocol,
            chat_template=settings.chat_template,
            thinking=settings.thinking,
            max_input_length=settings.max_input_length,
            force_chat=settings.force_chat,
            generation_config=checkpoint.generation_config,
            stop_newline=settings.stop_newline,
            min_one_token=settings.min_one_token == "all",
            legacy_decode_cleanup=settings.legacy_decode_cleanup,
        )
        limit, window = settings.max_input_length, encoder.window
        if limit is not None and window is not None and limit >= window:
            raise ValueError(
                f"--max_input_length {limit} leaves no room for an answer in the model's window of {window} tokens"
            )
        return encoder

    def datasets(self, checkpoint: Checkpoint, encoder: PromptEncoder) -> list[Dataset]:
        """Raises:
        ValueError: a prompt limit that leaves no room for a dataset's answers.
        """
        return [self._dataset(encoder, name) for name in self.sources]

    def _dataset(self, encoder: PromptEncoder, name: str) -> Dataset:
        task, limit = get_task(name), self.settings.max_input_length
        max_new = self.settings.max_new_tokens or task.max_new_tokens
        if limit is not None and encoder.window is not None and limit + max_new > encoder.window:
            raise ValueError(
                f"--max_input_length {limit} leaves no room for the {max_new} new tokens of {name} in the model's "
                f"window of {encoder.window} tokens"
            )
        facts = {
            "rows": len(self.sources[name].records),
            **self.sources[name].facts,
            "max_new_tokens": max_new,
            "prompt_limit": encoder.limit(max_new),
        }
        return Dataset(name, task, self.chosen[name], max_new, facts)

    def encode(self, encoder: PromptEncoder, dataset: Dataset, record: dict) -> tuple[str, EncodedPrompt]:
        text = self.prompts.render(dataset.name, record)
        return text, encoder.encode(dataset.task, text, dataset.max_new_tokens, record["input"])

    def fields(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        names = ("length", "dataset", "language", "all_classes", "_id")
        row = {"input": record["input"], "answers": record["answers"], "pred": pred}
        row |= {name: record[name] for name in names}
        return row | ({"context": record["context"]} if self.settings.save_context else {})

    def scores(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        return {"score": score_example(dataset.name, pred, record["answers"], record["all_classes"])}

    def tags(self) -> list[str]:
        return [self.settings.protocol] if self.settings.protocol != "longbench" else []

    def identity(self) -> dict[str, Any]:
        settings, prompts = self.settings, self.prompts
        return super().identity() | {
            "protocol": settings.protocol,
            "prompts": {"source": prompts.source, "sha256": prompts.sha256, "official": prompts.official},
            "force_chat": settings.force_chat,
            "stop_newline": list(settings.stop_newline),
            "min_one_token": settings.min_one_token,
        }

    def notes(self) -> list[str]:
        if self.prompts.source == "kvfactory":
            return [
                "prompts are kvfactory's own wording, since LongBench's prompt files are not there: scores are not "
                "comparable with published ones (python -m kvfactory.data download fetches the files)"
            ]
        if not self.prompts.official:
            return [
                f"the prompt file {self.prompts.path} differs from LongBench's: scores are not comparable with "
                "published ones"
            ]
        return []

    def score_again(self, dataset: Dataset, row: dict[str, Any]) -> float:
        return score_example(dataset.name, row["pred"], row["answers"], row["all_classes"])

    def rescore(self, root: Path) -> list[str]:
        return ["eval.py", "--results_dir", str(root)]


@dataclass(frozen=True)
class _Source:
    """All records of a dataset, where they are from for messages, and what the run record says about that."""

    records: list[dict]
    where: str
    facts: dict[str, Any]


def _read_files(settings: LongBenchSettings) -> dict[str, _Source]:
    return {
        name: _Source(read_dataset(file, name), str(file), {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()})
        for name, file in locate_data(settings.data_dir, settings.datasets).items()
    }


def _read_hub(settings: LongBenchSettings, prompts: PromptSet) -> dict[str, _Source]:
    opened = open_hub_dataset(settings.hf_dataset)
    found = {}
    for name in settings.datasets:
        records = read_hub_dataset(opened, name, prompts)
        # of the records themselves: the same ones can be stored in many ways
        facts = {"sha256": content_sha256(records), "hf_dataset": {"id": opened.id, "revision": opened.revision}}
        found[name] = _Source(records, f"--hf_dataset {opened.given}, {name}", facts)
    return found


def _check_scorable(name: str, where: str, records: list[dict]) -> None:
    """Scores a dummy prediction for every record: a missing package or a bad answer is told now, not after hours."""
    for record in records:
        try:
            score_example(name, "a", record["answers"], record["all_classes"])
        except ValueError as error:
            raise ValueError(f"{where}, _id {record['_id']!r} cannot be scored: {error}") from error
