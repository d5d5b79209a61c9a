"""What tells one run from another: the file label, and the settings that the run record compares."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvfactory.data.encode import PromptEncoder
from kvfactory.data.templates import parse_thinking
from kvfactory.loading import Computation
from kvfactory.plan import Plan
from kvfactory.reports.run_paths import settings_label
from kvfactory.run_settings import RunSettings
from kvfactory.settings import as_dict
from kvfactory.suites.base import Suite


def label_of(plan: Plan, suite: Suite, computation: Computation, usual: Computation) -> str:
    """The file label: method, a tag for each named non-default, and a hash of all other non-defaults.

    Args:
        usual: what the defaults resolve to on this machine; a value typed out that equals it is no non-default.
    """
    settings = suite.settings
    named = [plan.granularity] if plan.granularity != "query_head" else []
    named += [plan.gqa_score_agg] if plan.gqa_score_agg != "mean" else []
    named += [plan.merge if plan.merge_target == "kv" else f"{plan.merge}-{plan.merge_target}"] if plan.merge else []
    named += [f"{settings.quant_method}{settings.nbits or ''}"] if settings.quant_method else []
    named += [plan.preset] if plan.preset != "factory" else []
    named += suite.tags()
    return settings_label(plan.method, named, _others(plan, suite, computation, usual))


def _others(plan: Plan, suite: Suite, computation: Computation, usual: Computation) -> dict[str, Any]:
    """Result-relevant settings without a tag of their own that are not at their defaults."""
    settings = suite.settings
    preset = {name: cell_value(plan, name) for name in as_dict(plan.settings)}
    found = {name: value for name, value in as_dict(plan.settings).items() if value != preset[name]}
    found |= setting_files(plan)  # a file counts by its content, wherever it lies
    for name in ("dtype", "attn_implementation", "decode", "fuse"):
        if getattr(computation, name) != getattr(usual, name):
            found[name] = getattr(computation, name)
    given = settings.given()
    plain = ("max_new_tokens", "legacy_decode_cleanup", "use_fast_tokenizer", *suite.label_fields)
    found |= {name: given[name] for name in plain if name in given}
    if skips_template(plan, settings):
        found["window_skip_template"] = settings.window_skip_template
    if parse_thinking(settings.thinking):
        found["thinking"] = parse_thinking(settings.thinking)
    if suite.ids:
        found["ids"] = suite.ids.sha256
    if suite.sampled:
        found["random_examples"] = settings.max_num_examples
    if "seed" in given and (suite.reads_seed or plan.cluster.capability.randomised):
        found["seed"] = settings.seed
    return found


def skips_template(plan: Plan, settings: RunSettings) -> bool:
    """Whether the observation window of `plan` moves in front of the chat template; without a window nothing does."""
    return plan.observation_window is not None and settings.window_skip_template == "on"


def setting_files(plan: Plan) -> dict[str, str]:
    """SHA-256 of the files that method settings name, by setting."""
    paths = {name: Path(value) for name, value in as_dict(plan.settings).items() if name.endswith("_path") and value}
    return {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in paths.items() if p.is_file()}


def cell_value(plan: Plan, name: str) -> Any:
    """The preset's value of a method setting, as JSON has it."""
    value = plan.settings.__dataclass_fields__[name].metadata[plan.preset].value
    return list(value) if isinstance(value, tuple) else value


def record_settings(plan: Plan, suite: Suite, computation: Computation, encoder: PromptEncoder) -> dict[str, Any]:
    """Every result-relevant setting, resolved; model and tokenizer identity come on top.

    A choice without effect on the method is null, except the granularity, whose name is kept for the tables.
    """
    settings, budget, capability = suite.settings, plan.budget, plan.cluster.capability
    computed = asdict(computation)
    for name in ("device", "device_map"):
        computed.pop(name)  # of each segment's hardware: a run may go on elsewhere
    return {
        "method": plan.method,
        "method_settings": as_dict(plan.settings) | setting_files(plan),
        "recalled_settings": plan.recalled,
        "preset": plan.preset,
        "max_capacity_prompts": budget.tokens if plan.uses_budget else None,
        "max_capacity_prompts_ratio": budget.ratio if plan.uses_budget else None,
        "budget_bytes": budget.bytes_percent if plan.uses_budget else None,
        "budget_means": capability.budget_means,
        "kv_cache_granularity": plan.granularity,
        "granularity_has_effect": not capability.same_for_all_heads,
        "gqa_score_agg": plan.gqa_score_agg if capability.reads_queries else None,
        "window_skip_template": None if plan.observation_window is None else skips_template(plan, settings),
        "merge": plan.merge,
        "merge_target": plan.merge_target if plan.merge else None,
        "quant_method": settings.quant_method,
        "nbits": settings.nbits,
        "seed": settings.seed if capability.randomised else None,
        "random_examples": [settings.max_num_examples, settings.seed] if suite.sampled else None,
        **computed,
        **({"ids": {"count": len(suite.ids.lines), "sha256": suite.ids.sha256}} if suite.ids else {}),
        **suite.identity(),
        "thinking": parse_thinking(settings.thinking),
        "max_new_tokens": settings.max_new_tokens,
        "encoding": encoder.describe(),
        "generation": {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    }
