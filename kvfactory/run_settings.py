"""Settings that all runners share: every flag that is neither a method's nor a benchmark's own, declared once.

The command line (`kvfactory.cli`), its documentation and the run record are made from the fields below. Settings of
methods are declared with the methods, those of a benchmark with its suite (`kvfactory.suites`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from kvfactory.budget import Budget
from kvfactory.capability import BACKENDS, GRANULARITIES, MERGE_TARGETS, MERGES
from kvfactory.data.longbench import SAMPLE_METHODS
from kvfactory.registry import unknown_name
from kvfactory.settings import PRESETS, check_seed, number, parse_switch, whole_number

if TYPE_CHECKING:
    from kvfactory.suites.base import Suite

QUANTISERS: tuple[str, ...] = ()
"""Names that --quant_method accepts besides none."""

LAUNCHERS = ("local", "ray")
"""Names that --launcher accepts besides none."""

GROUPS = {
    "what": "What runs",
    "data": "Data and prompts",
    "budget": "Budget and cache",
    "compute": "Model and computation",
    "files": "Files, resuming, shards",
    "show": "Output",
}


def words(text: str) -> tuple[str, ...]:
    """ "a, b" -> ("a", "b"), without repetitions; ValueError when nothing is named."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ValueError("at least one name is needed")
    return parts


def whole_numbers(text: str) -> tuple[int, ...]:
    """ "128,512" -> (128, 512)."""
    return tuple(dict.fromkeys(whole_number(part) for part in text.split(",")))


def fractions(text: str) -> tuple[float, ...]:
    """ "0.1,0.2" -> (0.1, 0.2)."""
    return tuple(dict.fromkeys(number(part) for part in text.split(",")))


def percentages(text: str) -> tuple[float, ...]:
    """ "25%,50" -> (25.0, 50.0)."""
    return tuple(dict.fromkeys(number(part.strip().removesuffix("%")) for part in text.split(",")))


KINDS: dict[Callable[[str], Any], str] = {
    whole_number: "a whole number",
    whole_numbers: "a whole number, or several separated by commas",
    fractions: "a number, or several separated by commas",
    percentages: "a percentage such as 25%, or several separated by commas",
    words: "a name, or several separated by commas",
    parse_switch: "True or False",
}
"""How messages call what a flag accepts, by the function that reads it."""


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    read: Callable[[str], Any] = str,
    choices: tuple[str, ...] | None = None,
    alias: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A field of `RunSettings` that is a flag of the command line; a bool default makes a switch without value.

    Args:
        group: key of `GROUPS`, where --help and the docs show it.
        read: turns the typed text into the value; ValueError for what it does not accept.
        alias: further spellings.
    """
    assert group in GROUPS
    metadata = {"group": group, "help": help, "read": read, "choices": choices, "alias": alias, "metavar": metavar}
    return field(default=default, metadata=metadata)


def same_flag(name: str, *, alias: tuple[str, ...]) -> Any:
    """The shared flag `name`, for a runner that accepts further spellings of it."""
    shared = RunSettings.__dataclass_fields__[name]
    return field(default=shared.default, metadata={**shared.metadata, "alias": alias})


@dataclass(frozen=True)
class RunSettings(ABC):
    """The shared flags. `checked` returns them with canonical names, or refuses them.

    Attributes:
        program: the runner's file, as it is typed.
        benchmark: what the runner runs, for --help.
    """

    program: ClassVar[str]
    benchmark: ClassVar[str]

    # What runs
    method: tuple[str, ...] = flag(
        "what", (), "method, or several separated by commas; names in any case, see --list_methods", read=words
    )
    model_path: str | None = flag(
        "what", None, "local folder, hub id, or smollm2 (the small bundled model, fetched once)"
    )
    preset: str = flag(
        "what",
        "factory",
        "values of method settings that are not given: factory as the original runner, paper as each paper",
        choices=PRESETS,
    )
    seed: int = flag("what", 42, "of randomised methods and of --sample_method random", read=whole_number)
    list_methods: bool = flag("what", False, "print what every method can do, and stop")
    verify: bool = flag("what", False, "with --list_methods: try every claimed combination on a tiny model")

    # Data and prompts
    ids: str | None = flag(
        "data",
        None,
        "text file with one _id a line: only these examples of the selected datasets; --max_num_examples, "
        "--sample_method and shards then take from what is left",
        metavar="FILE",
    )
    max_num_examples: int | None = flag("data", None, "at most so many examples per dataset", read=whole_number)
    sample_method: str = flag(
        "data",
        "topk",
        "which examples --max_num_examples takes: the first ones, or random ones (by seed and dataset)",
        choices=SAMPLE_METHODS,
    )
    thinking: str = flag(
        "data", "off", "off, on, or a number of tokens on top of the limit, for models that have a thinking block"
    )
    max_new_tokens: int | None = flag(
        "data", None, "overrides every dataset's own limit of new tokens", read=whole_number
    )
    legacy_decode_cleanup: bool = flag(
        "data", False, "clean up spaces when decoding, as transformers before 5 did for some tokenizers"
    )

    # Budget and cache
    max_capacity_prompts: tuple[int, ...] = flag(
        "budget",
        (),
        "prompt tokens kept per stored head and layer, window included; several separated by commas; 512 when no "
        "budget is given; -1 counts as not given",
        read=whole_numbers,
    )
    max_capacity_prompts_ratio: tuple[float, ...] = flag(
        "budget", (), "instead: fraction of the prompt that is kept, in (0, 1]", read=fractions
    )
    budget_bytes: tuple[float, ...] = flag(
        "budget", (), "instead: stored bytes as a share of FullKV's at the same prompt, e.g. 25%", read=percentages
    )
    kv_cache_granularity: str = flag(
        "budget", "query_head", "heads that choose their tokens on their own", choices=GRANULARITIES
    )
    gqa_score_agg: str = flag(
        "budget",
        "mean",
        "with kv_head: how the scores of a group's query heads become one",
        choices=("mean", "max", "sum"),
    )
    window_skip_template: str = flag(
        "budget",
        "off",
        "on: the observation window lies in front of the chat template that ends a prompt, and both are kept inside "
        "the budget; for methods that score by such a window",
        choices=("off", "on"),
    )
    merge: str | None = flag(
        "budget",
        None,
        f"what becomes of evicted tokens: {', '.join(MERGES)} average them into kept ones; none drops them",
    )
    merge_target: str = flag("budget", "kv", "what --merge averages: keys and values, or values", choices=MERGE_TARGETS)
    quant_method: str | None = flag(
        "budget", None, f"quantiser of stored keys and values: {', '.join((*QUANTISERS, 'none'))}"
    )
    nbits: int | None = flag("budget", None, "bits of the quantiser", read=whole_number)

    # Model and computation
    attn_implementation: str = flag("compute", "auto", "attention kernels", choices=("auto", *BACKENDS))
    dtype: str = flag(
        "compute",
        "auto",
        "precision of the model; auto is the checkpoint's on CUDA and float32 on CPU",
        choices=("auto", "float16", "bfloat16", "float32"),
    )
    device: str = flag("compute", "auto", "where the model runs", choices=("auto", "cuda", "cpu"))
    device_map: str = flag(
        "compute",
        "auto",
        "which GPUs hold the model: auto takes one where that is enough, else spreads the layers over all that are "
        "visible; balanced always spreads them evenly; a JSON file gives each module, such as model.layers.0, a device",
        metavar="auto|balanced|FILE",
    )
    decode: str = flag(
        "compute",
        "auto",
        "who generates, with the same tokens: loop is our own, a forward a token; graph replays it as a captured CUDA "
        "graph; hf is the generate of transformers; auto is graph on CUDA, and loop, with a note, where that cannot be",
        choices=("auto", "loop", "graph", "hf"),
    )
    fuse: str = flag(
        "compute",
        "auto",
        "auto: in half precision on CUDA the model's norms, activations and rotations run as fused kernels, which may "
        "change the last bit of a result; off: as transformers has them",
        choices=("auto", "off"),
    )
    verify_decode: bool = flag(
        "compute", False, "decode the first example of every graph run in the loop as well, and compare the tokens"
    )
    eval_batch_size: int = flag(
        "compute",
        1,
        "examples that decode together; prompts are prefilled one by one, so results equal those of batch 1 up to "
        "near-ties of logits",
        read=whole_number,
    )
    use_cache: bool = flag(
        "compute", True, "kept for scripts of the original: False is refused", read=parse_switch, metavar="True"
    )
    use_fast_tokenizer: bool = flag(
        "compute", True, "False loads the slow tokenizer where there is one", read=parse_switch, metavar="True"
    )

    # Files, resuming, shards
    save_dir: str = flag("files", "./results", "folder of all results")
    run_name: str | None = flag(
        "files", None, "file name of the results instead of Method+suffix; with one method only"
    )
    overwrite: bool = flag("files", False, "start anew instead of going on with what is there")
    resume: str = flag(
        "files",
        "auto",
        "what is there is gone on with: auto refuses where a setting or the data have changed since; force does so all "
        "the same, and the run record keeps which results were made otherwise",
        choices=("auto", "force"),
    )
    fail_fast: bool = flag("files", False, "stop at the first example that fails")
    save_prompts: bool = flag("files", False, "store each filled-in prompt (before it is cut and wrapped)")
    num_shards: int | None = flag(
        "files",
        None,
        "split the examples over so many calls; with --launcher over so many processes, by default one per GPU",
        read=whole_number,
    )
    shard_id: int | None = flag("files", None, "which of them this call does, from 0", read=whole_number)
    merge_shards: bool = flag("files", False, "join the files of --num_shards finished calls, and stop")
    launcher: str | None = flag(
        "files",
        None,
        "run all shards in processes of their own, then join them: local gives each GPU of this machine one at a time, "
        "ray those of its cluster; none leaves that to you",
    )

    # Output
    errors_as_zero: bool = flag("show", False, "count failed examples as 0 in the table that is printed")
    quiet: bool = flag("show", False, "no progress")

    def checked(self, methods: Any) -> RunSettings:
        """Settings with canonical names; what arguments alone decide is decided here.

        Args:
            methods: the method registry (anything with `canonical`).

        Raises:
            ValueError: one sentence naming the flag, the value and what is accepted.
        """
        if not self.method:
            raise ValueError("--method is missing: give one or several names, see --list_methods")
        if not self.model_path:
            raise ValueError("--model_path is missing: give a local folder, a hub id, or smollm2")
        if not self.use_cache:
            raise ValueError("--use_cache False leaves no cache to compress or to measure: leave it at True")
        if self.verify:
            raise ValueError("--verify belongs to --list_methods")
        if self.resume == "force" and self.overwrite:
            raise ValueError("--resume force goes on with what is there and --overwrite discards it: give one of them")
        for name in ("max_num_examples", "max_new_tokens", "eval_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        self.refuse_empty("save_dir", "run_name", "ids")
        check_seed(self.seed)
        self.budgets()
        method = tuple(dict.fromkeys(methods.canonical(name) for name in self.method))
        if self.run_name is not None and len(method) > 1:
            raise ValueError(
                f"--run_name {self.run_name} names one file, but --method names {len(method)} methods: "
                "give one method, or leave --run_name out"
            )
        quantiser = optional_name("quantiser", self.quant_method, QUANTISERS)
        if quantiser is None and self.nbits is not None:
            raise ValueError(f"--nbits {self.nbits} is read by quantisers only: give --quant_method, or leave it out")
        launcher = optional_name("launcher", self.launcher, LAUNCHERS)
        self._check_shards(launcher)
        return dataclasses.replace(
            self,
            method=method,
            num_shards=self.num_shards if launcher else self.num_shards or 1,
            launcher=launcher,
            merge=optional_name("merge", self.merge, MERGES),
            quant_method=quantiser,
        )

    def method_defaults(self, method: str, budget: Budget) -> dict[str, str]:
        """Values that a benchmark gives to settings of `method` which were not given; none unless it says so."""
        return {}

    def refuse_empty(self, *names: str) -> None:
        """ValueError for an empty name or path, as an unset shell variable gives; a path would be the current one."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ValueError(f"--{name} is empty: give a value, or leave the flag out")

    @abstractmethod
    def suite(self) -> Suite:
        """The benchmark of these settings, its data read as far as that needs no model."""

    def _check_shards(self, launcher: str | None) -> None:
        count = 1 if self.num_shards is None else self.num_shards
        if count < 1:
            raise ValueError(f"--num_shards {count} must be at least 1")
        if launcher is not None:
            for name, given in (("shard_id", self.shard_id is not None), ("merge_shards", self.merge_shards)):
                if given:
                    raise ValueError(f"--launcher {launcher} runs and joins all shards: leave --{name} out")
            if self.device_map != "auto":
                raise ValueError(
                    f"--launcher {launcher} gives each shard one GPU, so --device_map {self.device_map} has nothing to "
                    "spread: leave one of them out"
                )
            return
        if self.merge_shards and (count == 1 or self.shard_id is not None):
            raise ValueError("--merge_shards needs --num_shards N as in the calls it joins, and no --shard_id")
        if self.merge_shards:
            return
        if count > 1 and self.shard_id is None:
            raise ValueError(f"--num_shards {count} needs --shard_id, from 0 to {count - 1}, or --launcher local")
        if self.shard_id is not None and not 0 <= self.shard_id < count:
            raise ValueError(f"--shard_id {self.shard_id} must be from 0 to {count - 1} with --num_shards {count}")

    @property
    def shard(self) -> tuple[int, int] | None:
        """(K, N), or None for an undivided run."""
        count = self.num_shards or 1
        return (self.shard_id, count) if count > 1 and self.shard_id is not None else None

    def budgets(self) -> list[Budget]:
        """One budget per value given, in the order given; ValueError for values and mixtures that cannot be."""
        tokens = tuple(value for value in self.max_capacity_prompts if value != -1)
        ratios, percents = self.max_capacity_prompts_ratio, self.budget_bytes
        if sum(map(bool, (tokens, ratios, percents))) > 1:
            raise ValueError(
                "--max_capacity_prompts, --max_capacity_prompts_ratio and --budget_bytes state the same thing in "
                "different ways: give one of them"
            )
        found = [Budget(tokens=value) for value in tokens]
        found += [Budget(ratio=value) for value in ratios]
        found += [Budget(bytes_percent=value) for value in percents]
        return found or [Budget.of()]

    def given(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


def optional_name(kind: str, name: str | None, known: Sequence[str]) -> str | None:
    """The canonical spelling of an optional name; None for None, "" and "none" in any case.

    Raises:
        ValueError: unknown, with near matches.
    """
    if name is None or name.strip().lower() in ("", "none"):
        return None
    spelling = {canonical.lower(): canonical for canonical in known}
    if name.strip().lower() not in spelling:
        raise ValueError(unknown_name(kind, name, ["none", *known]))
    return spelling[name.strip().lower()]
