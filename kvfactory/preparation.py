"""From settings to a checked job: everything that can be refused is refused here, before weights load.

Nothing is written; the only trace a refusal may leave is a model or a data set in the download cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvfactory.cli import settings_of, unread_settings
from kvfactory.data.encode import EncodedPrompt, PromptEncoder
from kvfactory.data.longbench import shard
from kvfactory.data.templates import parse_thinking
from kvfactory.kernels.dispatch import why_torch
from kvfactory.loading import Checkpoint, Computation, check_attachable, open_checkpoint, resolve_computation
from kvfactory.methods import METHODS
from kvfactory.methods.snapkv import WindowSettings
from kvfactory.plan import Plan, make_plan
from kvfactory.reports.files import check_writable
from kvfactory.reports.run_paths import RunPaths
from kvfactory.run_identity import label_of, record_settings
from kvfactory.run_settings import RunSettings
from kvfactory.suites.base import Dataset, Suite


@dataclass(frozen=True)
class DatasetPart:
    """One dataset's part in a job.

    Attributes:
        share: the records of this shard.
        facts: what the run record says about it, the same for all methods.
        first: the first example's prompt, the same for every shard; None when it cannot be encoded, which is told
            with that example.
    """

    dataset: Dataset
    share: list[dict]
    facts: dict[str, Any]
    first: EncodedPrompt | None

    @property
    def name(self) -> str:
        return self.dataset.name


@dataclass(frozen=True)
class PlannedRun:
    """One method under one budget: its plan, its files, and what its record says.

    Attributes:
        decode: loop, graph or hf.
    """

    plan: Plan
    decode: str
    paths: RunPaths
    settings: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """A checked call of the runner."""

    settings: RunSettings
    suite: Suite
    checkpoint: Checkpoint
    computation: Computation
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
        return {name: [r["_id"] for r in part.dataset.records] for name, part in self.parts.items()}


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
    suite = settings.suite()
    launches = settings.launcher is not None and settings.num_shards != 1
    checkpoint = open_checkpoint(settings.model_path, settings.use_fast_tokenizer)
    computation = resolve_computation(
        checkpoint,
        settings.device,
        settings.dtype,
        settings.attn_implementation,
        settings.decode,
        settings.device_map,
        settings.fuse,
        launches=launches,
    )
    encoder = suite.encoder(checkpoint)
    datasets = suite.datasets(checkpoint, encoder)
    parts = {dataset.name: _part(suite, encoder, dataset) for dataset in datasets if dataset.records}
    left_out = [dataset.name for dataset in datasets if not dataset.records]
    most = max(len(part.dataset.records) for part in parts.values())
    if settings.eval_batch_size > most:
        raise ValueError(
            f"--eval_batch_size {settings.eval_batch_size} is more than the {most} examples of the largest dataset"
        )
    decoding = check_attachable(checkpoint, plans, computation)
    usual = resolve_computation(checkpoint, settings.device, launches=launches)
    identity = checkpoint.facts()
    runs = []
    for plan, (computed, obstacle) in zip(plans, decoding, strict=True):
        asked = "auto" if computation.decode == "graph" else computation.decode
        label = settings.run_name or label_of(plan, suite, dataclasses.replace(computation, decode=asked), usual)
        paths = RunPaths(settings.save_dir, checkpoint.name, plan.budget.tag, label, settings.shard)
        recorded = record_settings(plan, suite, computed, encoder) | identity
        facts = {name: _facts(plan, settings, encoder, part) for name, part in parts.items()}
        notes = _notes(plan, suite, facts, unread.get(plan.method, [])) + _computation_notes(plan, computed, obstacle)
        if left_out:
            notes += (f"--ids {settings.ids} names no example of {', '.join(left_out)}: nothing is run there",)
        runs.append(PlannedRun(plan, computed.decode, paths, recorded, facts, notes))
    _check_distinct(runs)
    return Job(settings, suite, checkpoint, computation, encoder, parts, runs)


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
        **(settings.method_defaults(method, budget) | settings_of(method, given)),
    )


def _part(suite: Suite, encoder: PromptEncoder, dataset: Dataset) -> DatasetPart:
    share = shard(
        dataset.records, *((suite.settings.shard[1], suite.settings.shard[0]) if suite.settings.shard else (1, 0))
    )
    task = dataset.task
    facts = {"examples": len(share)} | dataset.facts
    facts |= {
        "stop_ids": encoder.stop_ids(task),
        "min_new_tokens": encoder.min_new_tokens(task),
        "chat_wrapped": encoder.wraps(task),
    }
    first = _first_prompt(suite, encoder, dataset)
    if first is not None:
        facts |= {"prompt_head": first.head_text, "prompt_tail": first.tail_text}
        facts["template_tail_tokens"] = first.template_tail_tokens
    return DatasetPart(dataset, share, facts, first)


def _first_prompt(suite: Suite, encoder: PromptEncoder, dataset: Dataset) -> EncodedPrompt | None:
    try:
        return suite.encode(encoder, dataset, dataset.records[0])[1]
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
    suite: Suite,
    facts: dict[str, dict[str, Any]],
    unread: Sequence[str],
) -> tuple[str, ...]:
    """What the user is told once and the run record keeps."""
    notes = list(plan.notes())
    window = plan.observation_window
    skips = suite.settings.window_skip_template == "on"
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
    notes += suite.notes()
    return tuple(notes)


def _computation_notes(plan: Plan, computed: Computation, obstacle: str | None) -> tuple[str, ...]:
    """What runs more slowly than it could, and why."""
    why = why_torch(computed.device) if computed.device == "cuda" else None
    if why is not None:
        return (f"plain torch runs instead of the Triton kernels, and the loop instead of a graph: {why}",)
    if obstacle is not None:
        return (f"{plan.method} decodes in the loop instead of a graph: {obstacle}",)
    return ()


def _check_distinct(runs: list[PlannedRun]) -> None:
    seen: dict[Path, PlannedRun] = {}
    for run in runs:
        other = seen.setdefault(run.paths.meta, run)
        assert other is run, f"{other.plan.method} and {run.plan.method} share {run.paths.meta}"
