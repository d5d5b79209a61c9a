"""A plan: one method with every choice resolved and checked, before any weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfactory.budget import Budget
from kvfactory.capability import check_combination
from kvfactory.methods import METHODS
from kvfactory.methods.base import KVCluster, LayerShape
from kvfactory.methods.snapkv import WindowSettings
from kvfactory.settings import MethodSettings, check_seed, recalled_values, resolve_settings


@dataclass(frozen=True)
class Plan:
    """What `attach` puts on a model.

    Attributes:
        given: the method settings the user named, as they were given.
        settings: the settings in force.
        seed: of randomised methods.
    """

    cluster: type[KVCluster]
    settings: MethodSettings
    budget: Budget
    granularity: str
    gqa_score_agg: str
    preset: str
    seed: int
    merge: str | None = None
    merge_target: str = "kv"
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def method(self) -> str:
        return self.cluster.name

    @property
    def uses_budget(self) -> bool:
        return self.cluster.capability.budget_means != "none"

    @property
    def observation_window(self) -> int | None:
        """Width in tokens of the method's observation window; None for a method that has none."""
        return self.settings.window_size if isinstance(self.settings, WindowSettings) else None

    def check_template_tail(self, template_tail: int, prompt_len: int) -> None:
        """Raises ValueError for a template tail that cannot be, or that the method would not read."""
        if not 0 <= template_tail < prompt_len:
            raise ValueError(
                f"template_tail={template_tail} is not from 0 to {prompt_len - 1}, for a prompt of {prompt_len} tokens"
            )
        if template_tail and self.observation_window is None:
            raise ValueError(
                f"template_tail={template_tail} is not read by {self.method}, which has no observation window"
            )

    @property
    def recalled(self) -> list[str]:
        """Settings in force that come from memory of a paper rather than from its text or code."""
        return recalled_values(self.settings, self.preset, dict(self.given))

    def notes(self) -> list[str]:
        """What a user should be told once: axes of a sweep that have no effect on this method."""
        capability, told = self.cluster.capability, []
        if not self.uses_budget:
            told.append(f"{self.method} keeps every token: the budget has no effect")
        if self.granularity == "query_head" and capability.same_for_all_heads:
            told.append(
                f"{self.method} keeps the same tokens for all query heads: stored at kv heads, query_head has no effect"
            )
        if self.gqa_score_agg != "mean" and not capability.reads_queries:
            told.append(f"{self.method} does not score by queries: gqa_score_agg has no effect")
        return told

    def build(self, shape: LayerShape) -> KVCluster:
        """The cluster of one layer."""
        return self.cluster(self.settings, shape, self.granularity, self.gqa_score_agg)


def make_plan(
    method: str,
    *,
    max_capacity_prompt: int | None = None,
    max_capacity_prompt_ratio: float | None = None,
    budget_bytes: float | None = None,
    kv_cache_granularity: str = "query_head",
    gqa_score_agg: str = "mean",
    preset: str = "factory",
    seed: int = 42,
    merge: str | None = None,
    merge_target: str = "kv",
    attn_implementation: str = "sdpa",
    **settings: Any,
) -> Plan:
    """Resolves and checks every choice that arguments alone decide.

    Args:
        method: name in any case.
        max_capacity_prompt: kept prompt tokens per stored head, window included; 512 when no budget is given.
        max_capacity_prompt_ratio: fraction of the prompt kept, instead.
        budget_bytes: stored bytes in percent of FullKV's, instead.
        merge: pivot or weighted: dropped tokens are averaged into kept ones at the end of the prompt.
        merge_target: kv, or v for values only.
        settings: the method's own settings, under the command line's names.

    Raises:
        ValueError: one sentence naming the flag, the value and what is accepted.
    """
    check_seed(seed)
    cluster = METHODS.get(method)
    resolved = resolve_settings(cluster.name, cluster.Settings, preset, settings)
    if max_capacity_prompt in (None, -1) and max_capacity_prompt_ratio is None and budget_bytes is None:
        max_capacity_prompt = resolved.own_budget()
    budget = Budget.of(max_capacity_prompt, max_capacity_prompt_ratio, budget_bytes)
    resolved.validate(budget.tokens if cluster.capability.budget_means != "none" else None)
    check_combination(
        cluster.name,
        cluster.capability,
        backend=attn_implementation,
        granularity=kv_cache_granularity,
        gqa_score_agg=gqa_score_agg,
        merge=merge,
        merge_target=merge_target,
    )
    return Plan(
        cluster=cluster,
        settings=resolved,
        budget=budget,
        granularity=kv_cache_granularity,
        gqa_score_agg=gqa_score_agg,
        preset=preset,
        seed=seed,
        merge=None if merge in (None, "none") else merge.lower(),
        merge_target=merge_target,
        given=tuple(sorted(settings.items())),
    )
