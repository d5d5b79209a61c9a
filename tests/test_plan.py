from __future__ import annotations

import pytest

from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS
from kvfactory.plan import make_plan


def plan(method, **options):
    return make_plan(method, **{**REQUIRED_SETTINGS.get(METHODS.canonical(method), {}), **options})


@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.parametrize("preset", ["factory", "paper"])
def test_every_method_has_a_plan_in_every_preset_and_spelling(method, preset):
    for name in (method, method.lower(), method.upper()):
        made = plan(name, preset=preset)
        assert made.method == method and made.budget.tokens == 512 and made.granularity == "query_head"


def test_what_was_given_is_remembered_apart_from_what_is_in_force():
    made = plan("SnapKV", kernel_size="9", preset="paper")
    assert dict(made.given)["kernel_size"] in (9, "9") and made.settings.kernel_size == 9
    assert made.settings.window_size == 32 and "kernel_size" not in made.recalled


@pytest.mark.parametrize(
    "method, options, told",
    [
        ("FullKV", {}, ["keeps every token", "stored at kv heads"]),
        ("FullKV", {"kv_cache_granularity": "kv_head"}, ["keeps every token"]),
        ("StreamingLLM", {}, ["stored at kv heads"]),
        ("L2Norm", {"kv_cache_granularity": "kv_head", "gqa_score_agg": "max"}, ["does not score by queries"]),
        ("SnapKV", {"gqa_score_agg": "max", "kv_cache_granularity": "kv_head"}, []),
    ],
)
def test_axes_without_effect_are_told(method, options, told):
    notes = plan(method, **options).notes()
    assert len(notes) == len(told)
    assert all(part in note for part, note in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(attn_implementation="flash"), "--attn_implementation 'flash' is not one of"),
        (dict(kv_cache_granularity="heads"), "--kv_cache_granularity 'heads' is not one of"),
        (dict(gqa_score_agg="median"), "--gqa_score_agg 'median' is not one of"),
        (dict(max_capacity_prompt=8), "--max_capacity_prompts 8 must be larger than the window of 8"),
        (dict(max_capacity_prompt=100, max_capacity_prompt_ratio=0.3), "exactly one"),
        (dict(sinks=4), "--sinks is not read by SnapKV"),
    ],
)
def test_bad_choices(options, word):
    with pytest.raises(ValueError, match=word):
        plan("SnapKV", **options)


def test_an_unknown_method_names_near_ones_and_all():
    with pytest.raises(ValueError, match="unknown method 'pyramid'.*Did you mean PyramidKV.*Available: .*FullKV"):
        make_plan("pyramid")


def test_the_budget_is_checked_only_where_it_counts():
    assert make_plan("FullKV", max_capacity_prompt=1).budget.tokens == 1
    with pytest.raises(ValueError, match="max_capacity_prompts 1"):
        make_plan("SnapKV", max_capacity_prompt=1)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_a_seed_that_cannot_be(seed):
    with pytest.raises(ValueError, match="^--seed .* is not a whole number from 0 to 4294967295$"):
        make_plan("random", seed=seed)


def test_the_largest_seed():
    assert make_plan("random", seed=2**32 - 1).seed == 2**32 - 1
