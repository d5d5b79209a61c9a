from __future__ import annotations

import math

import pytest
import torch
from golden_cases import random_qkv

from kvfactory.compress import compress_prompt
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.methods.nacl import NACL
from kvfactory.plan import make_plan
from kvfactory.settings import resolve_settings


def kept(q, k, v, budget: int, method: str = "nacl", **options) -> torch.Tensor:
    """(B, heads, n) positions."""
    out = compress_prompt(method, q, k, v, max_capacity_prompt=budget, **options)
    return torch.stack([torch.stack(row) for row in out.indices])


@pytest.mark.parametrize("granularity, heads", [("query_head", 6), ("kv_head", 2)])
@pytest.mark.parametrize("given", [{}, {"nacl_protect_proxy": True}, {"nacl_causal": False}, {"nacl_random_share": 1}])
def test_every_head_keeps_the_budget_with_sinks_and_recent_tokens(given, granularity, heads):
    q, k, v = random_qkv(2, 6, 2, 150, 16)
    positions = kept(q, k, v, 60, kv_cache_granularity=granularity, **given)
    assert positions.shape == (2, heads, 60) and (positions.diff(dim=-1) > 0).all()
    assert positions[..., :4].tolist() == [[[0, 1, 2, 3]] * heads] * 2
    recent = 32 if given.get("nacl_protect_proxy") else 8
    assert positions[..., -recent:].tolist() == [[list(range(150 - recent, 150))] * heads] * 2


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_selection_equals_the_loop(granularity):
    S, budget, proxies, sinks, recent = 90, 40, 20, 3, 5
    q, k, v = random_qkv(1, 6, 2, S, 16)
    given = {"sinks": sinks, "window_size": recent, "nacl_proxy": proxies, "nacl_random_share": 0.25}
    positions = kept(q, k, v, budget, kv_cache_granularity=granularity, sampler=lambda p: p, **given)[0]
    logits = (q.double() @ k.double().repeat_interleave(3, 1).transpose(2, 3))[0] * 0.25
    rows = logits.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    scores = rows[:, -proxies:].sum(1)
    scores = scores.view(2, 3, S).mean(1) if granularity == "kv_head" else scores
    free = budget - sinks - recent  # 32: 8 are drawn, 24 are the best
    for h, row in enumerate(scores.tolist()):
        ranked = sorted(range(sinks, S - recent), key=lambda j, row=row: -row[j])
        # The sampler returns the probabilities themselves, so the draw takes the next best ones.
        assert positions[h].tolist() == sorted([*range(sinks), *ranked[:free], *range(S - recent, S)])


def test_the_drawn_part_takes_the_rest_of_the_budget():
    q, k, v = random_qkv(1, 2, 2, 200, 16)
    best = kept(q, k, v, 51, nacl_random_share=0)[0]
    mixed = kept(q, k, v, 51, sampler=lambda p: -p)[0]  # the draw takes the least likely ones
    free = 51 - 12
    for h in range(2):
        common = set(best[h].tolist()) & set(mixed[h].tolist())
        assert len(common) == 51 - math.floor(7 / 19 * free) == 37  # 14 of 14.4


def test_without_a_draw_it_is_snapkv_without_pooling():
    q, k, v = random_qkv(1, 6, 2, 120, 16)
    given = {"nacl_proxy": 9, "nacl_random_share": 0, "sinks": 0, "window_size": 9}
    assert torch.equal(kept(q, k, v, 40, **given), kept(q, k, v, 40, "snapkv", window_size=9, kernel_size=1))


def test_with_every_query_a_proxy_it_is_h2o():
    q, k, v = random_qkv(1, 6, 2, 120, 16)
    given = {"nacl_proxy": 10**6, "nacl_random_share": 0, "sinks": 0}
    assert torch.equal(kept(q, k, v, 40, **given), kept(q, k, v, 40, "h2o"))


def test_draws_depend_on_seed_example_and_layer_alone():
    q, k, v = random_qkv(1, 4, 2, 120, 16)
    first = kept(q, k, v, 40, seed=1, example_id="a", layer_idx=1, num_layers=4)
    torch.manual_seed(5)
    kept(q, k, v, 40, seed=1, example_id="b")
    assert torch.equal(kept(q, k, v, 40, seed=1, example_id="a", layer_idx=1, num_layers=4), first)
    for other in ({"seed": 2}, {"example_id": "b"}, {"layer_idx": 2}):
        facts = {"seed": 1, "example_id": "a", "layer_idx": 1, "num_layers": 4} | other
        assert not torch.equal(kept(q, k, v, 40, **facts), first)


def test_an_even_draw_includes_every_candidate_equally_often():
    S, budget, trials = 40, 20, 1500
    q, k, v = random_qkv(1, 1, 1, S, 4)
    given = {"nacl_random_share": 1, "nacl_temperature": math.inf}
    counts = torch.zeros(S)
    settings = resolve_settings("NACL", NACL.Settings, "factory", given)
    cluster = NACL(settings, LayerShape(0, 1, 1, 1, 4))
    for example in range(trials):
        counts[cluster.positions(q, k, v, PromptContext(S, budget, example_id=str(example)))[0, 0]] += 1
    assert (counts[:4] == trials).all() and (counts[-8:] == trials).all()
    drawn, candidates = budget - 12, S - 12
    expected = trials * drawn / candidates
    spread = ((counts[4:-8] - expected) ** 2 / (expected * (1 - drawn / candidates))).sum().item()
    # Chi-square with 27 degrees of freedom; 60 is passed once in 4,000 times. The examples are fixed.
    assert spread * (candidates - 1) / candidates < 60


def test_proxies_are_a_hundredth_of_the_prompt_and_at_least_32():
    settings = NACL.Settings()
    assert [settings.proxies(S) for S in (20, 100, 3200, 3201, 10000)] == [20, 32, 32, 33, 100]


def test_a_lone_proxy_sees_the_same_with_and_without_causality():
    q, k, v = random_qkv(1, 4, 2, 90, 16)
    both = [kept(q, k, v, 40, nacl_proxy=1, nacl_random_share=0, nacl_causal=causal) for causal in (True, False)]
    assert torch.equal(*both)
    wide = [kept(q, k, v, 40, nacl_proxy=30, nacl_random_share=0, nacl_causal=causal) for causal in (True, False)]
    assert not torch.equal(*wide)


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"max_capacity_prompt": 12}, "--max_capacity_prompts 12 must be larger than the 4 sinks"),
        ({"max_capacity_prompt": 36, "nacl_protect_proxy": True}, "32 recent tokens .--nacl_protect_proxy on"),
        ({"sinks": -1}, "--sinks -1 is negative"),
        ({"window_size": -1}, "--window_size -1 is negative"),
        ({"nacl_proxy": 0}, "--nacl_proxy 0 leaves no query"),
        ({"nacl_random_share": 1.5}, "--nacl_random_share 1.5"),
        ({"nacl_temperature": 0}, "--nacl_temperature 0"),
        ({"nacl_temperature": float("nan")}, "--nacl_temperature nan"),
    ],
)
def test_bad_settings_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        make_plan("nacl", **given)


def test_proxies_that_outgrow_the_budget_are_refused_for_that_prompt():
    q, k, v = random_qkv(1, 1, 1, 5000, 4)
    with pytest.raises(ValueError, match="50 recent tokens .--nacl_protect_proxy on.*prompt of 5000 tokens"):
        kept(q, k, v, 50, nacl_protect_proxy=True)
