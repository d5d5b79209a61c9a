"""FullKV and the two controls, Random and Oracle."""

from __future__ import annotations

import pytest
import torch
from oracles import best
from tiny import random_prompt, shared_model, step

from kvfactory import attach, compress_prompt, detach
from kvfactory.cache.store import DenseStore
from kvfactory.methods import METHODS
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.settings import MethodSettings


def qkv(S=50):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, S, 8, generator=g) for h in (6, 2, 2))


@pytest.mark.parametrize("granularity, heads", [("query_head", 6), ("kv_head", 2)])
def test_fullkv_returns_everything(granularity, heads):
    q, k, v = qkv()
    out = compress_prompt("fullkv", q, k, v, kv_cache_granularity=granularity)
    assert [row.tolist() for row in out.indices[0]] == [list(range(50))] * heads
    assert torch.equal(torch.stack(out.keys[0]), k[0].repeat_interleave(heads // 2, 0))


def test_random_draws_per_head_and_keeps_the_window():
    q, k, v = qkv()
    out = compress_prompt("random", q, k, v, max_capacity_prompt=20, window_size=6)
    rows = [row.tolist() for row in out.indices[0]]
    assert all(row[-6:] == list(range(44, 50)) and len(set(row)) == 20 for row in rows)
    assert len({tuple(row) for row in rows}) == 6
    again = compress_prompt("random", q * 0, k * 0, v, max_capacity_prompt=20, window_size=6)
    assert [row.tolist() for row in again.indices[0]] == rows  # scores do not come from q or k
    other = compress_prompt("random", q, k, v, max_capacity_prompt=20, window_size=6, layer_idx=1, num_layers=2)
    assert [row.tolist() for row in other.indices[0]] != rows


def test_random_is_even():
    """Each of 44 free positions is drawn with probability 14 / 44 over 3,000 draws: six standard deviations."""
    q, k, v = qkv()
    counts = torch.zeros(50)
    for i in range(500):
        out = compress_prompt("random", q, k, v, max_capacity_prompt=20, window_size=6, example_id=str(i))
        for row in out.indices[0]:
            counts[row] += 1
    p = 14 / 44
    assert float((counts[:44] - 3000 * p).abs().max()) < 6 * (3000 * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_oracle_sees_the_top_tokens_of_each_step(granularity, how):
    q, k, v = qkv()
    cluster = METHODS.get("oracle")(MethodSettings(), LayerShape(0, 1, 6, 2, 8), granularity, how)
    got = cluster.select(q[:, :, -1:], DenseStore(k, v), PromptContext(prompt_len=50, budget=9))
    assert got.shape == (1, 6, 1, 50)
    probabilities = torch.stack(
        [torch.softmax(q[0, h, -1].double() @ k[0, h // 3].double().T * 8**-0.5, 0) for h in range(6)]
    )
    for h in range(6):
        if granularity == "kv_head":
            group = probabilities[h // 3 * 3 : h // 3 * 3 + 3]
            row = group.mean(0) if how == "mean" else group.max(0).values
        else:
            row = probabilities[h]
        assert got[0, h, 0].nonzero().flatten().tolist() == best(row.tolist(), 9)


def test_oracle_approaches_fullkv_with_its_budget():
    """Attending to the strongest tokens loses less than attending to fewer; everything is FullKV."""
    model, prompt, token = shared_model("llama"), random_prompt(61), random_prompt(1, seed=3)
    logits = {}
    for budget in (2, 20, 62):
        attachment = attach(model, "oracle", max_capacity_prompt=budget)
        cache = attachment.new_cache()
        step(model, prompt, cache)
        logits[budget] = step(model, token, cache)
        detach(model)
    attachment = attach(model, "fullkv")
    cache = attachment.new_cache()
    step(model, prompt, cache)
    full = step(model, token, cache)
    detach(model)
    loss = {b: float((x - full).abs().mean()) for b, x in logits.items()}
    assert loss[62] == 0 < loss[20] < loss[2]


@pytest.mark.parametrize("method", ["oracle"])
def test_methods_that_act_later_have_nothing_to_compress(method):
    with pytest.raises(ValueError, match="keeps every prompt token"):
        compress_prompt(method, *qkv(), max_capacity_prompt=20)
