"""What a method can do, and the single place where combinations are refused."""

from __future__ import annotations

from dataclasses import dataclass

from kvfactory.registry import unknown_name

STAGES = (
    "none",
    "prompt-evict",
    "decode-evict",
    "decode-select",
    "sparse-prefill",
    "channel",
    "cross-layer",
    "storage",
)
BUDGET_MEANINGS = ("slots per head", "mean over layers", "mean over heads", "tokens attended", "none")
GRANULARITIES = ("query_head", "kv_head")
BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")
MERGES = ("pivot", "weighted")
MERGE_TARGETS = ("kv", "v")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "phi3")


@dataclass(frozen=True)
class Capability:
    """What one method claims; `run_longbench.py --list_methods --verify` tries every claimed cell.

    Attributes:
        stage: when the method acts.
        budget_means: what --max_capacity_prompts counts for this method.
        same_for_all_heads: the kept tokens do not depend on the query head, so they are stored at kv heads in either
            granularity.
        drops_tokens: some prompt tokens are not stored, so merging and padded batches concern it.
        reads_queries: scores come from queries, so gqa_score_agg matters.
        randomised: draws from the seeded generator.
        backends, granularities: what it runs on.
        refusals: (cell, reason) for combinations that are mathematically meaningless.
        reference: paper, repository and file.
    """

    stage: str
    budget_means: str
    reference: str
    same_for_all_heads: bool = False
    drops_tokens: bool = True
    reads_queries: bool = True
    randomised: bool = False
    backends: tuple[str, ...] = BACKENDS
    granularities: tuple[str, ...] = GRANULARITIES
    refusals: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        assert self.stage in STAGES, self.stage
        assert self.budget_means in BUDGET_MEANINGS, self.budget_means
        assert set(self.backends) <= set(BACKENDS) and self.backends
        assert set(self.granularities) <= set(GRANULARITIES) and self.granularities
        assert self.reference


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> str:
    """`value` if it is one of `choices`; ValueError naming the flag otherwise."""
    if value not in choices:
        raise ValueError(f"--{flag} {value!r} is not one of {', '.join(choices)}")
    return value


def check_combination(
    method: str,
    capability: Capability,
    *,
    backend: str,
    granularity: str,
    gqa_score_agg: str = "mean",
    merge: str | None = None,
    merge_target: str = "kv",
) -> None:
    """Refuses what cannot work, before weights load.

    Raises:
        ValueError: one sentence naming the flag, the reason and what to use instead.
    """
    check_choice("attn_implementation", backend, BACKENDS)
    check_choice("kv_cache_granularity", granularity, GRANULARITIES)
    check_choice("gqa_score_agg", gqa_score_agg, ("mean", "max", "sum"))
    check_choice("merge_target", merge_target, MERGE_TARGETS)
    if merge not in (None, "none"):
        if merge.lower() not in MERGES:
            raise ValueError(unknown_name("merge", merge, list(MERGES)))
        if not capability.drops_tokens:
            raise ValueError(
                f"--merge {merge} has nothing to merge: {method} stores every prompt token; use an evicting method"
            )
    elif merge_target != "kv":
        raise ValueError(f"--merge_target {merge_target} is read with --merge only")
    if backend not in capability.backends:
        raise ValueError(
            f"{method} does not run on --attn_implementation {backend}; use one of {', '.join(capability.backends)}"
        )
    if granularity not in capability.granularities:
        raise ValueError(
            f"{method} does not store at --kv_cache_granularity {granularity}; "
            f"use {' or '.join(capability.granularities)}"
        )


def check_sliding(method: str, capability: Capability, sliding_layers: int, num_layers: int) -> None:
    """Refuses evicting methods on a model whose layers all slide: there is nothing to compress beyond the window."""
    if sliding_layers == num_layers and capability.stage != "none":
        raise ValueError(
            f"{method} has nothing to compress: all {num_layers} layers of this model attend through a sliding window "
            "and already drop what lies outside it; use --method fullkv"
        )
