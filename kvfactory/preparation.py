"""From settings to a checked job: everything that can be refused is refused here, before weights load.

Nothing is written; the only trace a refusal may leave is a model or a data set in the download cache.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfactory.cli import settings_of, unread_settings
from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.longbench import choose_examples, locate_data, read_dataset, shard
from kvfactory.data.prompts import PromptSet, load_prompts
from kvfactory.data.tasks import Task, get_task
from kvfactory.data.templates import parse_thinking
from kvfactory.loading import Checkpoint, Computation, check_attachable, open_checkpoint, resolve_computation
from kvfactory.methods import METHODS
from kvfactory.methods.snapkv import WindowSettings
from kvfactory.metrics import score_example
from kvfactory.plan import Plan, make_plan
from kvfactory.reports.files import check_writable
from kvfactory.reports.run_paths import RunPaths
from kvfactory.run_identity import label_of, record_settings
from kvfactory.run_settings import RunSettings


@dataclass(frozen=True)
class DatasetPart:
    """One dataset's part in a job.

    Attributes:
        records: the examples of the undivided run, in data order; `share` those of this shard.
        max_new_tokens: limit of the answer, without a thinking block.
        facts: what the run record says about it, the same for all methods.
        first: the first example's prompt, the same for every shard; None when it cannot be encoded, which is told
            with that example.
    """

    name: str
    task: Task
    records: list[dict]
    share: list[dict]
    max_new_tokens: int
    facts: dict[str, Any]
    first: EncodedPrompt | None


@dataclass(frozen=True)
class PlannedRun:
    """One method under one budget: its plan, its files, and what its record says."""

    plan: Plan
    paths: RunPaths
    settings: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A checked call of the runner."""

    settings: RunSettings
    checkpoint: Checkpoint
    computation: Computation
    prompts: PromptSet
    encoder: PromptEncoder
    parts: dict[str, DatasetPart]
    runs: list[PlannedRun]

    @cached_property
    def orders(self) -> dict[str, list[str]]:
        """`_id`s of this call's examples per dataset."""
        return {name: [r["_id"] for r in part.share] for name, part in self.parts.items()}

    @cached_property
    def whole_orders(self) -> dict[str, list[str]]:
        """`_id`s of the undivided run's examples per dataset."""
        return {name: [r["_id"] for r in part.records] for name, part in self.parts.items()}


def prepare(settings: RunSettings, given: dict[str, Any]) -> Job:
    """Checks and resolves a call.

    Args:
        settings: shared settings as typed.
        given: method settings that were typed, as text.

    Raises:
        ValueError: one sentence naming flag, file or line, the value and what is accepted.
    """
    settings = settings.checked(METHODS)
    unread = unread_settings(settings.method, given)
    plans = [_plan(settings, given, method, budget) for budget in settings.budgets() for method in settings.method]
    _check_window_skip(settings, plans)
    parse_thinking(settings.thinking)
    check_writable(settings.save_dir)
    files = locate_data(settings.data_dir, settings.datasets)
    prompts = load_prompts(settings.data_dir, settings.datasets)
    chosen = {name: _choose(settings, name, file) for name, file in files.items()}
    for name, file in files.items():
        _check_scorable(name, file, chosen[name][1])
    checkpoint = open_checkpoint(settings.model_path, settings.use_fast_tokenizer)
    computation = resolve_computation(
        checkpoint, settings.device, settings.dtype, settings.attn_implementation, settings.decode
    )
    encoder = make_encoder(settings, checkpoint)
    parts = {name: _part(settings, encoder, prompts, name, files[name], chosen[name]) for name in files}
    most = max(len(part.records) for part in parts.values())
    if settings.eval_batch_size > most:
        raise ValueError(
            f"--eval_batch_size {settings.eval_batch_size} is more than the {most} examples of the largest dataset"
        )
    check_attachable(checkpoint, plans, computation.attn_implementation)
    usual = resolve_computation(checkpoint, settings.device)
    identity = checkpoint.facts()
    runs = []
    for plan in plans:
        label = settings.run_name or label_of(plan, settings, computation, usual)
        paths = RunPaths(settings.save_dir, checkpoint.name, plan.budget.tag, label, settings.shard)
        recorded = record_settings(plan, settings, computation, encoder, prompts) | identity
        facts = {name: _facts(plan, settings, encoder, part) for name, part in parts.items()}
        notes = _notes(plan, settings, prompts, facts, unread.get(plan.method, []))
        runs.append(PlannedRun(plan, paths, recorded, facts, notes))
    _check_distinct(runs)
    return Job(settings, checkpoint, computation, prompts, encoder, parts, runs)


def _plan(settings: RunSettings, given: dict[str, Any], method: str, budget: Any) -> Plan:
    backend = settings.attn_implementation
    return make_plan(
        method,
        max_capacity_prompt=budget.tokens,
        max_capacity_prompt_ratio=budget.ratio,
        budget_bytes=budget.bytes_percent,
        kv_cache_granularity=settings.kv_cache_granularity,
        gqa_score_agg=settings.gqa_score_agg,
        preset=settings.preset,
        seed=settings.seed,
        merge=settings.merge,
        merge_target=settings.merge_target,
        attn_implementation="sdpa" if backend == "auto" else backend,
        **settings_of(method, given),
    )


def _choose(settings: RunSettings, name: str, file: Path) -> tuple[int, list[dict]]:
    records = read_dataset(file, name)
    chosen = choose_examples(records, settings.max_num_examples, settings.sample_method, settings.seed, name)
    return len(records), chosen


def _check_scorable(name: str, file: Path, records: list[dict]) -> None:
    """Scores a dummy prediction for every record: a missing package or a bad answer is told now, not after hours."""
    for record in records:
        try:
            score_example(name, "a", record["answers"], record["all_classes"])
        except ValueError as error:
            raise ValueError(f"{file}, _id {record['_id']!r} cannot be scored: {error}") from error


def make_encoder(settings: RunSettings, checkpoint: Checkpoint) -> PromptEncoder:
    """The prompt encoder of a run.

    Raises:
        ValueError: as `PromptEncoder`, or a prompt limit beyond the model's window.
    """
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


def _part(
    settings: RunSettings, encoder: PromptEncoder, prompts: PromptSet, name: str, file: Path, chosen: tuple[int, list]
) -> DatasetPart:
    task, (rows, records) = get_task(name), chosen
    max_new = settings.max_new_tokens or task.max_new_tokens
    if settings.max_input_length is not None and encoder.window is not None:
        if settings.max_input_length + max_new > encoder.window:
            raise ValueError(
                f"--max_input_length {settings.max_input_length} leaves no room for the {max_new} new tokens of {name} "
                f"in the model's window of {encoder.window} tokens"
            )
    share = shard(records, *((settings.shard[1], settings.shard[0]) if settings.shard else (1, 0)))
    facts = {
        "examples": len(share),
        "rows": rows,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "max_new_tokens": max_new,
        "prompt_limit": encoder.limit(max_new),
        "stop_ids": encoder.stop_ids(task),
        "min_new_tokens": encoder.min_new_tokens(task),
        "chat_wrapped": encoder.wraps(task),
    }
    first = _first_prompt(encoder, prompts, name, records[0], max_new)
    if first is not None:
        facts |= {"prompt_head": first.head_text, "prompt_tail": first.tail_text}
        facts["template_tail_tokens"] = first.template_tail_tokens
    return DatasetPart(name, task, records, share, max_new, facts, first)


def _first_prompt(
    encoder: PromptEncoder, prompts: PromptSet, name: str, record: dict, max_new_tokens: int
) -> EncodedPrompt | None:
    text = prompts.render(name, record)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the example itself tells it
            return encoder.encode(get_task(name), text, max_new_tokens, record["input"])
    except ValueError:
        return None


def skipped_template(settings: RunSettings, prompt: EncodedPrompt) -> int:
    """Tokens at the end of a prompt in front of which observation windows lie."""
    return prompt.template_tail_tokens if settings.window_skip_template == "on" else 0


def _check_window_skip(settings: RunSettings, plans: Sequence[Plan]) -> None:
    if settings.window_skip_template == "off" or any(plan.observation_window is not None for plan in plans):
        return
    readers = [name for name in METHODS if issubclass(METHODS.get(name).Settings, WindowSettings)]
    raise ValueError(
        f"--window_skip_template on is not read by {' or '.join(settings.method)}, only by methods that score by an "
        f"observation window: {', '.join(readers)}"
    )


def _facts(plan: Plan, settings: RunSettings, encoder: PromptEncoder, part: DatasetPart) -> dict[str, Any]:
    window = plan.observation_window
    if part.first is None or window is None:
        return part.facts
    skip = skipped_template(settings, part.first)
    template = min(window, part.first.template_tail_tokens - skip)
    text = encoder.window_text(part.first, window, skip)
    return part.facts | {"window_text": text, "window_template_tokens": template}


def _notes(
    plan: Plan,
    settings: RunSettings,
    prompts: PromptSet,
    facts: dict[str, dict[str, Any]],
    unread: Sequence[str],
) -> tuple[str, ...]:
    """What the user is told once and the run record keeps."""
    notes = list(plan.notes())
    window = plan.observation_window
    skips = settings.window_skip_template == "on"
    if skips and window is None:
        unread = [*unread, "window_skip_template"]
    elif skips and not any(f.get("template_tail_tokens") for f in facts.values()):
        notes.append("no prompt ends in chat template: --window_skip_template on has no effect")
    if unread:
        notes.append(f"{plan.method} does not read {', '.join('--' + name for name in unread)}: no effect on it")
    if plan.recalled:
        names = ", ".join(plan.recalled)
        notes.append(
            f"{plan.method}: the {plan.preset} preset's {names} is recalled, not read from the paper or its code"
        )
    if window is not None:
        mostly = [name for name, f in facts.items() if 2 * f.get("window_template_tokens", 0) > window]
        if mostly:
            tokens = facts[mostly[0]]["window_template_tokens"]
            notes.append(
                f"{plan.method} scores with the last {window} tokens, of which {tokens} are chat template on "
                f"{', '.join(mostly)}: fewer than half are prompt"
            )
    if prompts.source == "kvfactory":
        notes.append(
            "prompts are kvfactory's own wording, since LongBench's prompt files are not there: scores are not "
            "comparable with published ones (python -m kvfactory.data download fetches the files)"
        )
    elif not prompts.official:
        notes.append(
            f"the prompt file {prompts.path} differs from LongBench's: scores are not comparable with published"
        )
    return tuple(notes)


def _check_distinct(runs: list[PlannedRun]) -> None:
    seen: dict[Path, PlannedRun] = {}
    for run in runs:
        other = seen.setdefault(run.paths.meta, run)
        assert other is run, f"{other.plan.method} and {run.plan.method} share {run.paths.meta}"
