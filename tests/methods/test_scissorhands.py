from __future__ import annotations

import pytest
import torch
from golden_cases import random_qkv

from kvfactory.compress import compress_prompt
from kvfactory.plan import make_plan


def kept(q, k, v, budget: int, method: str = "scissorhands", **options) -> torch.Tensor:
    """(B, heads, n) positions."""
    out = compress_prompt(method, q, k, v, max_capacity_prompt=budget, **options)
    return torch.stack([torch.stack(row) for row in out.indices])


def statistics(q, k, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(Hq, S) low counts and sums of one row, from dense attention in float64."""
    S, group = q.shape[2], q.shape[1] // k.shape[1]
    logits = (q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3))[0] * q.shape[3] ** -0.5
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    rows = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    low = (rows * torch.arange(1, S + 1)[:, None] < 1) & seen
    return low[:, max(0, S - window) :].sum(1), rows[:, max(0, S - window) :].sum(1)


@pytest.mark.parametrize("window, sinks, recent", [(400, 0, 10), (25, 3, 7), (1, 0, 1)])
@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("normalize", [False, True])
def test_selection_equals_the_loop(granularity, window, sinks, recent, normalize):
    S, budget = 90, 35
    q, k, v = random_qkv(1, 6, 2, S, 16)
    counts, sums = statistics(q, k, window)
    counts, sums = counts.double(), sums
    if normalize:
        counts /= torch.tensor([S - max(j, S - window, 0) for j in range(S)])
    if granularity == "kv_head":
        counts, sums = (x.view(2, 3, S).mean(1) for x in (counts, sums))
    given = {"scissor_window": window, "sinks": sinks, "scissor_recent": recent, "scissor_normalize": normalize}
    positions = kept(q, k, v, budget, kv_cache_granularity=granularity, **given)[0]
    for h in range(counts.shape[0]):
        # Float noise of a normalised or averaged count must not decide before the sums do.
        key = [(round(counts[h, j].item(), 5), -sums[h, j].item(), -j) for j in range(S)]
        ranked = sorted(range(sinks, S - recent), key=key.__getitem__)
        expected = sorted([*range(sinks), *ranked[: budget - sinks - recent], *range(S - recent, S)])
        assert positions[h].tolist() == expected


def test_ties_decide_most_of_the_selection():
    """What the tie rule is for: with the counts alone most of the kept set would be arbitrary."""
    q, k, _ = random_qkv(1, 6, 2, 90, 16)
    counts, _ = statistics(q, k, 5)
    assert all(len(set(row.tolist())) <= 6 for row in counts)


def test_even_attention_keeps_the_latest_tokens():
    """No weight is below an even share, sums tie on all columns that every row sees, and later tokens win."""
    q, k, v = random_qkv(1, 2, 2, 90, 16)
    q = torch.zeros_like(q)
    positions = kept(q, k, v, 30, scissor_window=20, scissor_recent=20)
    assert positions.tolist() == [[list(range(60, 90))] * 2]


def test_sums_over_all_rows_are_h2o():
    q, k, v = random_qkv(1, 6, 2, 120, 16)
    scissors = kept(q, k, v, 40, scissor_score="sum", scissor_window=500, scissor_recent=8)
    assert torch.equal(scissors, kept(q, k, v, 40, "h2o"))


def test_sums_over_the_last_rows_are_snapkv_without_pooling():
    q, k, v = random_qkv(1, 6, 2, 120, 16)
    scissors = kept(q, k, v, 40, scissor_score="sum", scissor_window=12, scissor_recent=12)
    assert torch.equal(scissors, kept(q, k, v, 40, "snapkv", window_size=12, kernel_size=1))


def test_a_draw_follows_the_sums_and_its_generator():
    q, k, v = random_qkv(1, 6, 2, 120, 16)
    best = kept(q, k, v, 40, scissor_select="prob", sampler=lambda p: p)
    assert torch.equal(best, kept(q, k, v, 40, scissor_score="sum"))
    first = kept(q, k, v, 40, scissor_select="prob", seed=1, example_id="a")
    assert torch.equal(kept(q, k, v, 40, scissor_select="prob", seed=1, example_id="a"), first)
    assert not torch.equal(kept(q, k, v, 40, scissor_select="prob", seed=1, example_id="b"), first)
    assert first[0, :, -10:].tolist() == [list(range(110, 120))] * 6


def test_max_over_a_group_differs_from_the_mean():
    q, k, v = random_qkv(1, 8, 2, 120, 16)
    by = {a: kept(q, k, v, 40, kv_cache_granularity="kv_head", gqa_score_agg=a) for a in ("mean", "sum", "max")}
    assert torch.equal(by["mean"], by["sum"]) and not torch.equal(by["mean"], by["max"])


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"max_capacity_prompt": 10}, "--max_capacity_prompts 10 must be larger than the 0 sinks"),
        ({"max_capacity_prompt": 12, "sinks": 2}, "must be larger than the 2 sinks"),
        ({"sinks": -1}, "--sinks -1 is negative"),
        ({"scissor_window": 0}, "--scissor_window 0"),
        ({"scissor_recent": 0}, "--scissor_recent 0"),
        ({"scissor_drop": 1.0}, "--scissor_drop 1.0 is not in"),
        ({"scissor_drop": 0}, "--scissor_drop 0.0 is not in"),
        ({"scissor_temperature": 2}, "belongs to --scissor_select prob"),
        ({"scissor_select": "prob", "scissor_temperature": -1}, "--scissor_temperature -1"),
        ({"scissor_normalize": True, "scissor_score": "sum"}, "--scissor_normalize on divides counts"),
        ({"window_size": 8}, "is not read by Scissorhands"),
    ],
)
def test_bad_settings_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        make_plan("scissorhands", **given)


def test_presets():
    factory, paper = (make_plan("scissorhands", preset=p).settings for p in ("factory", "paper"))
    assert (factory.scissor_window, factory.scissor_recent, factory.scissor_drop) == (400, 10, None)
    assert (paper.scissor_window, paper.scissor_recent, paper.scissor_drop) == (400, 10, 0.4)
