"""Needle in a haystack: one sentence at several depths of texts of several lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvfactory.budget import Budget
from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.tasks import Task
from kvfactory.data.templates import OWN_CHAT_TEMPLATES
from kvfactory.loading import Checkpoint
from kvfactory.needle.grid import DEPTH_INTERVALS, DEPTH_KINDS, depths, lengths, parse_depths
from kvfactory.needle.haystack import ANSWER_ROOM, NeedleHaystack, haystack_text, prompt_text
from kvfactory.needle.heat_map import write_heat_map
from kvfactory.needle.needles import NEEDLES, Needle, read_needle
from kvfactory.needle.scores import needle_scores
from kvfactory.registry import unknown_name
from kvfactory.reports.records import ResultFile
from kvfactory.run_settings import RunSettings, flag, same_flag, words
from kvfactory.settings import whole_number
from kvfactory.suites.base import Dataset, Suite

if TYPE_CHECKING:
    from kvfactory.preparation import Job

NEEDLE_TASK = Task("needle", "recall", "en", 64, "needle", newline_stop=True)
ANCHOR_WINDOW = 32
ANCHOR_METHODS = ("SnapKV", "H2O", "CAM", "StreamingLLM")


@dataclass(frozen=True)
class NeedleSettings(RunSettings):
    """Flags of run_needle_in_haystack.py."""

    program: ClassVar[str] = "run_needle_in_haystack.py"
    benchmark: ClassVar[str] = "needle in a haystack"

    model_path: str | None = same_flag("model_path", alias=("model_name",))
    model_provider: str | None = flag(
        "what", None, "kept for scripts of the original: without effect, the tokenizer says where sentences end"
    )
    anchor_windows: bool = flag(
        "what",
        False,
        "the observation windows of the original's needle script: 32 tokens for SnapKV, H2O, CAM and StreamingLLM (all "
        "else of its budget being sinks) where --window_size or --sinks is not given",
    )
    s_len: int = flag("data", 1000, "shortest context in tokens, question and answer included", read=whole_number)
    e_len: int = flag("data", 8000, "longest context in tokens", read=whole_number)
    step: int = flag("data", 1000, "tokens from one length to the next", read=whole_number)
    depths: str | None = flag(
        "data", None, "depths of the needle in percent, separated by commas, instead of intervals", metavar="N[,N]"
    )
    depth_intervals: int = flag("data", DEPTH_INTERVALS, "number of depths from 0 to 100 percent", read=whole_number)
    depth_kind: str = flag("data", "linear", "how depths are spread", choices=DEPTH_KINDS)
    needle: tuple[str, ...] = flag(
        "data",
        (NEEDLES[0].name,),
        f"built-in needles, separated by commas, or all: {', '.join(n.name for n in NEEDLES)}; each has every cell of "
        f"the grid (default: {NEEDLES[0].name})",
        read=words,
    )
    needle_file: str | None = flag("data", None, "text file with a needle of your own; needs --question")
    question: str | None = flag("data", None, "what is asked about the needle of --needle_file")
    haystack_dir: str | None = flag(
        "data", None, "folder of .txt files for the haystack; default kvfactory's own text, drawn by --seed"
    )
    chat_template: str = flag(
        "data",
        "auto",
        "tokenizer: wrap prompts by the tokenizer's chat template; none: bare, as the original; auto: tokenizer where "
        "there is one",
        choices=OWN_CHAT_TEMPLATES,
    )
    max_capacity_prompts: tuple[int, ...] = same_flag("max_capacity_prompts", alias=("max_capacity_prompt",))
    save_dir: str = flag("files", "./results_needle", "folder of all results")
    run_name: str | None = same_flag("run_name", alias=("model_version",))

    def checked(self, methods: Any) -> NeedleSettings:
        """See `RunSettings.checked`; `full` is accepted for FullKV, as in the original."""
        self.refuse_empty("needle_file", "haystack_dir")
        self.axes()
        names = ["fullkv" if name.lower() == "full" else name for name in self.method]
        renamed = dataclasses.replace(self, method=tuple(names), needle=self._needle_names())
        settings = super(NeedleSettings, renamed).checked(methods)
        if self.anchor_windows and not set(settings.method) & set(ANCHOR_METHODS):
            raise ValueError(
                f"--anchor_windows is not read by {' or '.join(settings.method)}, only by {', '.join(ANCHOR_METHODS)}: "
                "leave it out"
            )
        return settings

    def _needle_names(self) -> tuple[str, ...]:
        known = [needle.name for needle in NEEDLES]
        if self.needle_file is not None:
            if self.needle != (known[0],):
                raise ValueError(f"--needle {','.join(self.needle)} and --needle_file both name a needle: give one")
            return ()
        if [name.lower() for name in self.needle] == ["all"]:
            return tuple(known)
        for name in self.needle:
            if name.lower() not in known:
                raise ValueError(unknown_name("needle", name, ["all", *known]))
        return tuple(name.lower() for name in self.needle)

    def axes(self) -> tuple[range, list[int]]:
        """Lengths in tokens and depths in percent of the grid; ValueError naming the flag."""
        rows = depths(self.depth_intervals, self.depth_kind)
        if self.depths is not None:
            if self.depth_intervals != DEPTH_INTERVALS or self.depth_kind != DEPTH_KINDS[0]:
                raise ValueError("--depths gives the depths themselves: leave --depth_intervals and --depth_kind out")
            rows = parse_depths(self.depths)
        return lengths(self.s_len, self.e_len, self.step), rows

    def method_defaults(self, method: str, budget: Budget) -> dict[str, str]:
        """See `RunSettings.method_defaults`; ValueError for a budget without room for the original's window."""
        if not self.anchor_windows or method not in ANCHOR_METHODS:
            return {}
        if method != "StreamingLLM":
            return {"window_size": str(ANCHOR_WINDOW)}
        if budget.tokens is None or budget.tokens <= ANCHOR_WINDOW:
            raise ValueError(
                f"--anchor_windows gives StreamingLLM a window of {ANCHOR_WINDOW} tokens and the rest of the budget as "
                f"sinks: give --max_capacity_prompts above {ANCHOR_WINDOW}"
            )
        return {"sinks": str(budget.tokens - ANCHOR_WINDOW)}

    def suite(self) -> NeedleInHaystack:
        return NeedleInHaystack(self)


class NeedleInHaystack(Suite):
    """A grid of lengths and depths (gkamradt/LLMTest_NeedleInAHaystack; KVCache-Factory, run_needle_in_haystack.py)."""

    settings: NeedleSettings
    row_fields = ("answers", "scores", "context_length", "depth_percent")
    metric = "share of the needle's words found"
    label_fields = ("chat_template", "needle", "question")

    def __init__(self, settings: NeedleSettings):
        """Raises:
        ValueError: a needle or a haystack that cannot be read.
        """
        super().__init__(settings)
        built_in = {needle.name: needle for needle in NEEDLES}
        own = settings.needle_file is not None or settings.question is not None
        chosen = (
            [read_needle(settings.needle_file, settings.question)] if own else [built_in[n] for n in settings.needle]
        )
        self.needles: dict[str, Needle] = {needle.name: needle for needle in chosen}
        self.text = haystack_text(settings.haystack_dir, settings.seed)
        self.haystack: NeedleHaystack | None = None
        self.overhead: dict[str, int] = {}
        self.trained_length: int | None = None

    @property
    def reads_seed(self) -> bool:
        return self.settings.haystack_dir is None or super().reads_seed

    def encoder(self, checkpoint: Checkpoint) -> PromptEncoder:
        """Raises:
        ValueError: a length above the model's window, or a chat template that is not there.
        """
        settings = self.settings
        encoder = PromptEncoder(
            checkpoint.tokenizer,
            checkpoint.config,
            chat_template=settings.chat_template,
            thinking=settings.thinking,
            generation_config=checkpoint.generation_config,
            legacy_decode_cleanup=settings.legacy_decode_cleanup,
        )
        self.trained_length = encoder.window
        longest = settings.axes()[0][-1]
        if encoder.window is not None and longest > encoder.window:
            raise ValueError(
                f"--e_len {settings.e_len} is above the model's window of {encoder.window} tokens, and needle prompts "
                "are not cut: take shorter lengths"
            )
        return encoder

    def datasets(self, checkpoint: Checkpoint, encoder: PromptEncoder) -> list[Dataset]:
        """Raises:
        ValueError: a length that a needle does not fit into, or that does not fit the window with its new tokens; an
            `_id` of --ids that is no cell of the grid.
        """
        settings = self.settings
        max_new = settings.max_new_tokens or NEEDLE_TASK.max_new_tokens
        self.haystack = NeedleHaystack(checkpoint.tokenizer, self.text)
        for name, needle in self.needles.items():
            around = encoder.count_whole(NEEDLE_TASK, prompt_text("", needle)) + max_new
            self.overhead[name] = max(0, around - ANSWER_ROOM)
            self.haystack.place(settings.s_len, 0, needle, self.overhead[name])
        records = [
            {"_id": f"len{length}_depth{depth}_{name}", "length": length, "depth": depth, "needle": name}
            for name in self.needles
            for length, depth in product(*settings.axes())
        ]
        if self.ids:
            self.ids.check_found({record["_id"] for record in records}, [NEEDLE_TASK.name])
        chosen = self.choose(NEEDLE_TASK.name, records)
        facts = {
            "haystack": {"source": self.text.source, "sha256": self.text.sha256},
            "needles": {n.name: {"text": n.text, "question": n.question} for n in self.needles.values()},
            "max_new_tokens": max_new,
        }
        dataset = Dataset(NEEDLE_TASK.name, NEEDLE_TASK, chosen, max_new, facts)
        longest = max(chosen, key=lambda record: record["length"])
        try:
            self.encode(encoder, dataset, longest)
        except ValueError as error:
            given = "" if settings.max_new_tokens is None else f" with --max_new_tokens {max_new}"
            raise ValueError(f"--e_len {settings.e_len}, length {longest['length']}{given}: {error}") from error
        return [dataset]

    def encode(self, encoder: PromptEncoder, dataset: Dataset, record: dict) -> tuple[str, EncodedPrompt]:
        assert self.haystack is not None, "datasets() comes first"
        length, depth, needle = record["length"], record["depth"], self.needles[record["needle"]]
        overhead, over = self.overhead[needle.name], 1
        while over > 0:  # text that is tokenised again can have a few tokens more, for which 200 mostly leave room
            text = self.haystack.prompt(length, depth, needle, overhead)
            over = encoder.count_whole(dataset.task, text) + dataset.max_new_tokens - length
            overhead += over
        return text, encoder.encode_whole(dataset.task, text, dataset.max_new_tokens)

    def fields(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        needle = self.needles[record["needle"]]
        return {
            "question": needle.question,
            "answers": [needle.text],
            "pred": pred,
            "needle": needle.name,
            **self.place(record),
            "dataset": dataset.name,
            "_id": record["_id"],
        }

    def place(self, record: dict) -> dict[str, Any]:
        return {"context_length": record["length"], "depth_percent": record["depth"]}

    def scores(self, dataset: Dataset, record: dict, pred: str) -> dict[str, Any]:
        found = needle_scores(self.needles[record["needle"]], pred)
        return {"score": found["recall"], "scores": found}

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"trained_length": self.trained_length}

    def notes(self) -> list[str]:
        provider = self.settings.model_provider
        return [] if provider is None else [f"--model_provider {provider} has no effect: the tokenizer is read"]

    def score_again(self, dataset: Dataset, row: dict[str, Any]) -> float:
        return needle_scores(self.needles[row["needle"]], row["pred"])["recall"]

    def rescore(self, root: Path) -> list[str]:
        return ["scripts/scripts_needle/visualize.py", str(root)]

    def finish(self, job: Job) -> list[str]:
        """Draws the heat map of every run beside its results; a shard's grid is drawn when the shards are merged."""
        if job.settings.shard is not None:
            return []
        told = []
        for planned in job.runs:
            path = planned.paths.results(NEEDLE_TASK.name)
            with ResultFile(path, job.whole_orders[NEEDLE_TASK.name]) as results:
                rows = results.rows()
            if not any(row.get("error") is None for row in rows):
                continue
            picture = path.with_name(f"{planned.paths.label}.png")
            title = f"{job.checkpoint.name} {planned.plan.budget.tag} {planned.paths.label}"
            mean = write_heat_map(rows, picture, picture.with_suffix(".csv"), title, self.trained_length)
            told.append(f"heat map: {picture} (mean recall {mean:.3f})")
        return told
