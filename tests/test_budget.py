from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfactory import attach
from kvfactory.budget import DEFAULT_CAPACITY, Budget
from kvfactory.compress import compress_prompt
from kvfactory.plan import make_plan
from kvfactory.tiny_models import tiny_model


def test_nothing_given_is_the_default_and_minus_one_counts_as_not_given():
    assert Budget.of().tokens == DEFAULT_CAPACITY == 512
    assert Budget.of(tokens=-1).tokens == 512
    assert Budget.of(tokens=-1, ratio=0.2).ratio == 0.2


@pytest.mark.parametrize(
    "budget, tag",
    [
        (Budget(512), "512"),
        (Budget(ratio=0.2), "r0.2"),
        (Budget(ratio=1), "r1"),
        (Budget(bytes_percent=12.5), "bytes12.5"),
    ],
)
def test_tags(budget, tag):
    assert budget.tag == tag


@pytest.mark.parametrize(
    "parts, word",
    [
        (dict(tokens=0), "max_capacity_prompts 0"),
        (dict(tokens=-7), "max_capacity_prompts -7"),
        (dict(tokens=1.5), "max_capacity_prompts 1.5"),
        (dict(tokens=True), "max_capacity_prompts True"),
        (dict(tokens="many"), "max_capacity_prompts 'many'"),
        (dict(tokens=float("inf")), "max_capacity_prompts inf"),
        (dict(ratio=0), "max_capacity_prompts_ratio 0"),
        (dict(ratio=1.01), "max_capacity_prompts_ratio 1.01"),
        (dict(ratio=float("nan")), "max_capacity_prompts_ratio nan"),
        (dict(bytes_percent=0), "budget_bytes 0%"),
        (dict(bytes_percent=101), "budget_bytes 101%"),
        (dict(tokens=5, ratio=0.5), "exactly one"),
        (dict(), "exactly one"),
    ],
)
def test_bad_budgets(parts, word):
    with pytest.raises(ValueError, match=word):
        Budget(**parts)


@pytest.mark.parametrize("tokens", [64.0, np.int64(64)])
def test_whole_numbers_of_other_types_become_int(tokens):
    budget = Budget(tokens)
    assert budget.resolve(1000) == 64 and type(budget.resolve(1000)) is int and budget.tag == "64"


def test_tokens_and_ratio():
    assert Budget(100).resolve(40) == 100
    assert Budget(ratio=0.2).resolve(1003) == 201
    assert Budget(ratio=0.001).resolve(40) == 1
    assert Budget(ratio=1).resolve(41) == 41


@pytest.mark.parametrize("percent, tokens", [(100, 50), (50, 25), (49, 24), (1.99, None), (2, 1), (99.9, 49)])
def test_a_share_of_bytes_is_the_largest_budget_that_fits(percent, tokens):
    """7 bytes a token: the method stores 7 * B, FullKV 350."""
    budget = Budget(bytes_percent=percent)
    if tokens is None:
        with pytest.raises(ValueError, match="less than one token"):
            budget.resolve(50, lambda b: 7 * b, 350)
    else:
        assert budget.resolve(50, lambda b: 7 * b, 350) == tokens


def test_query_head_storage_needs_g_times_the_bytes_below_the_prompt_and_none_at_it():
    """Three copies of every token, but a whole prompt is stored once: 100 % is the prompt, 99 % a third of it."""

    def stored(b):
        return 50 if b >= 50 else 3 * b

    assert Budget(bytes_percent=100).resolve(50, stored, 50) == 50
    assert Budget(bytes_percent=99).resolve(50, stored, 50) == 16


@pytest.mark.parametrize(
    "budget, given",
    [(Budget(ratio=0.001), "--max_capacity_prompts_ratio 0.001"), (Budget(bytes_percent=25), "--budget_bytes 25%")],
)
def test_a_budget_that_came_to_too_few_tokens_blames_the_flag_that_gave_it(budget, given):
    settings = make_plan("snapkv").settings
    sentence = f"{given} keeps 7 of 560 prompt tokens: a budget of 7 must be larger than the window of 8"
    with pytest.raises(ValueError, match=f"^{sentence}"):
        budget.check_resolved(7, 560, settings.validate)
    budget.check_resolved(9, 560, settings.validate)
    budget.check_resolved(7, 7, settings.validate)  # nothing is compressed


def test_compressing_by_a_ratio_blames_the_ratio():
    q = torch.randn(1, 2, 40, 4)
    with pytest.raises(ValueError, match="^--max_capacity_prompts_ratio 0.1 keeps 4 of 40 prompt tokens"):
        compress_prompt("snapkv", q, q, q, max_capacity_prompt_ratio=0.1)


def test_bytes_that_uncompressed_layers_exceed():
    with pytest.raises(ValueError, match="^--budget_bytes 25% is less .* takes 40.6% of FullKV's bytes together with"):
        Budget(bytes_percent=25).resolve(100, lambda tokens: 2 * 100 + 3 * tokens, 500)


@pytest.mark.parametrize(
    "method, options, told",
    [
        ("snapkv", {"max_capacity_prompt_ratio": 0.1}, "--max_capacity_prompts_ratio 0.1 keeps 4 of 40 prompt tokens"),
        ("snapkv", {"budget_bytes": 10}, "--budget_bytes 10% keeps 1 of 40 prompt tokens"),
        ("l2norm", {"budget_bytes": 25}, "--budget_bytes 25% is less than one token per head, which takes 67.5%"),
    ],
)
def test_an_attached_model_blames_the_flag_that_gave_the_budget(method, options, told):
    attachment = attach(tiny_model("llama"), method, **options)  # 3 layers, 2 of which L2Norm leaves whole
    with pytest.raises(ValueError, match=f"^{told}"):
        attachment.resolve_budget(attachment.plan, 40)
