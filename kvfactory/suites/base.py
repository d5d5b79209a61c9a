"""A benchmark as the runner sees it: where its records come from, how they become prompts, what an answer is worth.

Everything else (methods, batching, resuming, shards, the proof of compression, records of what was stored) is the
runner's and the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.longbench import choose_examples
from kvfactory.data.subset_ids import read_ids
from kvfactory.data.tasks import Task
from kvfactory.run_settings import RunSettings

if TYPE_CHECKING:
    from pathlib import Path

    from kvfactory.loading import Checkpoint
    from kvfactory.preparation import Job


@dataclass(frozen=True)
class Dataset:
    """The records of one result file.

    Attributes:
        name: path of the results below the run folder, e.g. "hotpotqa" or "4096/vt".
        records: the chosen ones, in data order, each with a text `_id`; none where --ids names none of the dataset.
        max_new_tokens: limit of the answer, without a thinking block.
        facts: what the run record says about the data and its prompts, the same for all methods.
    """

    name: str
    task: Task
    records: list[dict[str, Any]]
    max_new_tokens: int
    facts: dict[str, Any]


class Suite(ABC):
    """One benchmark under the settings of one call.

    Attributes:
        row_fields: fields of a finished row that scoring reads, besides `pred` and `score`.
        metric: what the score is, for the line below the final table.
        label_fields: settings of the benchmark that change results; at other values than their defaults they go into
            the file label's hash.
        ids: the content of --ids, None without it.
    """

    row_fields: ClassVar[tuple[str, ...]]
    metric: ClassVar[str]
    label_fields: ClassVar[tuple[str, ...]] = ("chat_template",)

    def __init__(self, settings: RunSettings):
        """Raises:
        ValueError: the file of --ids cannot be read, is empty or names an example twice.
        """
        self.settings = settings
        self.ids = None if settings.ids is None else read_ids(settings.ids)

    def choose(self, name: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of a dataset's records that --ids and then --max_num_examples leave, in data order."""
        settings, ids = self.settings, self.ids.lines if self.ids else None
        return choose_examples(records, settings.max_num_examples, settings.sample_method, settings.seed, name, ids)

    @abstractmethod
    def encoder(self, checkpoint: Checkpoint) -> PromptEncoder:
        """The prompt encoder of the run; ValueError for choices that the tokenizer or the window cannot follow."""

    @abstractmethod
    def datasets(self, checkpoint: Checkpoint, encoder: PromptEncoder) -> list[Dataset]:
        """All datasets of the call; ValueError for data that cannot be run."""

    @abstractmethod
    def encode(self, encoder: PromptEncoder, dataset: Dataset, record: dict[str, Any]) -> tuple[str, EncodedPrompt]:
        """(filled-in prompt before any cut and wrap, what the model sees); ValueError when it does not fit."""

    @abstractmethod
    def fields(self, dataset: Dataset, record: dict[str, Any], pred: str) -> dict[str, Any]:
        """The leading fields of a result row, `_id` and `pred` among them."""

    def place(self, record: dict[str, Any]) -> dict[str, Any]:
        """Fields that say where in the benchmark a row belongs, for rows that failed as well."""
        return {}

    @abstractmethod
    def scores(self, dataset: Dataset, record: dict[str, Any], pred: str) -> dict[str, Any]:
        """`score` in [0, 1], and further fields about it; ValueError for an answer that cannot be scored."""

    def tags(self) -> list[str]:
        """Tags of the file label for choices of the benchmark that have a name."""
        return []

    def identity(self) -> dict[str, Any]:
        """Result-relevant choices of the benchmark, resolved, for the run record."""
        return {"chat_template": self.settings.chat_template}

    def notes(self) -> list[str]:
        """What the user is told once and the run record keeps."""
        return []

    @abstractmethod
    def score_again(self, dataset: Dataset, row: dict[str, Any]) -> float:
        """The score of a finished row, from its prediction and references; ValueError as `scores`."""

    @abstractmethod
    def rescore(self, root: Path) -> list[str]:
        """The command, less the interpreter, that recomputes scores from the result files below `root`."""

    def finish(self, job: Job) -> list[str]:
        """What is made from finished result files beside them -> sentences for the user."""
        return []

    @property
    def reads_seed(self) -> bool:
        """Whether --seed changes which prompts are run."""
        return self.sampled

    @property
    def sampled(self) -> bool:
        """Whether the examples are a random choice."""
        return self.settings.sample_method == "random" and self.settings.max_num_examples is not None
