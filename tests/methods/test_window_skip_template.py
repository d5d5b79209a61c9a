"""The observation window in front of a template tail: positions, budgets, refusals, and the way into the caches."""

from __future__ import annotations

import oracles
import pytest
import torch
from oracles import best, dense_attention, pool, reduce_heads
from tiny import random_prompt, shared_model, step

from kvfactory import attach, compress_prompt, detach, generate
from kvfactory.example import check_compression
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.plan import make_plan

S, W, B = 83, 5, 40
METHODS = {
    "snapkv": {},
    "pyramidkv": {},
    "adakv": {},
    "adakv-pyramid": {"adakv_pyramid": True, "adakv_rounding": "exact"},
    "headkv": {"headkv_accounting": "original"},
    "headkv-on-top": {"headkv_accounting": "factory"},
}
GRANULARITIES = ("query_head", "kv_head")


def options(name, **more):
    found = {"window_size": W, "max_capacity_prompt": B} | METHODS[name]
    if name.startswith("headkv"):
        found["head_path"] = "uniform"
    return found | more


def qkv(length=S, Hq=6, Hk=2, D=12, seed=0):
    q, k, v = oracles.qkv(length, Hq, Hk, D, seed)
    q[:, 2:] *= 2  # heads of different sharpness, so that AdaKV's counts differ
    return q, k, v


def compress(name, q, k, v, **more):
    return compress_prompt(name.split("-")[0], q, k, v, layer_idx=1, num_layers=5, **options(name, **more))


def positions(kept):
    return [row.tolist() for row in kept.indices[0]]


def scores(q, k, tail, granularity):
    """Pooled attention of the queries [S - tail - W, S - tail) to what lies before them, one list per stored head."""
    start, stop = q.shape[2] - tail - W, q.shape[2] - tail
    raw = dense_attention(q, k, q.shape[3] ** -0.5)[:, :, start:stop, :start].mean(2)
    if granularity == "kv_head":
        raw = reduce_heads(raw, k.shape[1], "mean")
    return [pool(row.tolist(), 7, "maxpool") for row in raw[0]]


@pytest.mark.parametrize("tail", [1, 13])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", METHODS)
def test_the_window_moves_and_the_tail_is_kept(name, granularity, tail):
    q, k, v = qkv()
    kept = compress(name, q, k, v, kv_cache_granularity=granularity, template_tail=tail)
    got = positions(kept)
    # The best by the moved window's scores, head by head, then window and tail.
    first = S - tail - W
    for row, ranked in zip(got, scores(q, k, tail, granularity), strict=True):
        assert row == best(ranked, len(row) - W - tail) + list(range(first, S))
    # How many: what the method gives the prompt without its tail at a budget without its tail, plus the tail.
    inside = 0 if name == "headkv-on-top" else tail
    cut = (x[:, :, : S - tail] for x in (q, k, v))
    want = compress(name, *cut, kv_cache_granularity=granularity, max_capacity_prompt=B - inside)
    assert got == [row + list(range(S - tail, S)) for row in positions(want)]
    for head, row in enumerate(got):
        source = head if granularity == "kv_head" else head // 3
        assert torch.equal(kept.keys[0][head], k[0, source, row]) and torch.equal(
            kept.values[0][head], v[0, source, row]
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name, each", [("snapkv", B), ("headkv", B), ("headkv-on-top", B + W + 13), ("adakv", None)])
def test_window_and_tail_count_as_the_budget_says(name, each, granularity):
    more = {"adakv_rounding": "exact"} if name == "adakv" else {}
    kept = compress(name, *qkv(), kv_cache_granularity=granularity, template_tail=13, **more)
    lengths = [len(row) for row in positions(kept)]
    heads = 6 if granularity == "query_head" else 2
    assert sum(lengths) == heads * (each or B) and len(lengths) == heads
    if each is not None:
        assert set(lengths) == {each}
    else:
        assert len(set(lengths)) > 1


@pytest.mark.parametrize("length", [57, 69, 300])  # 57: the cut prompt alone is in the uniform branch
def test_a_pyramid_adds_up_with_a_tail(length):
    shape = [LayerShape(i, 5, 6, 2, 12) for i in range(5)]
    for method, more in (("pyramidkv", {}), ("adakv", {"adakv_pyramid": True})):
        plan = make_plan(method, max_capacity_prompt=B, window_size=W, pyramid_rounding="exact", **more)
        ctx = PromptContext(length, B, template_tail=13)
        kept = [plan.build(s).kept(ctx) for s in shape]
        assert sum(kept) == 5 * B and min(kept) >= W + 13
        assert (len(set(kept)) == 1) == (length - 13 < 2 * (B - W - 13))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", METHODS)
def test_no_tail_is_the_window_at_the_end_bit_for_bit(name, granularity):
    q, k, v = qkv()
    zero = compress(name, q, k, v, kv_cache_granularity=granularity, template_tail=0)
    usual = compress(name, q, k, v, kv_cache_granularity=granularity)
    assert positions(zero) == positions(usual)
    for row, ranked in zip(positions(zero), scores(q, k, 0, granularity), strict=True):
        assert row == best(ranked, len(row) - W) + list(range(S - W, S))
    for a, b in zip(zero.keys[0] + zero.values[0], usual.keys[0] + usual.values[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "headkv-on-top"])
def test_a_budget_without_room_is_refused_and_one_more_token_is_not(name):
    q, k, v = qkv()
    with pytest.raises(ValueError) as caught:
        compress(name, q, k, v, template_tail=B - W)
    flags = ("--window_skip_template on", "--max_capacity_prompts 40", "--window_size")
    for part in (*flags, "35 template tokens", "window of 5 tokens", "83 tokens", "at least 41"):
        assert part in str(caught.value)
    for row in positions(compress(name, q, k, v, max_capacity_prompt=B + 1, template_tail=B - W)):
        assert row[-B:] == list(range(S - B, S))


def test_on_top_of_the_budget_there_is_always_room():
    row = positions(compress("headkv-on-top", *qkv(), max_capacity_prompt=3, template_tail=B))[0]
    assert len(row) == 3 + W + B
    assert positions(compress("headkv-on-top", *qkv(), max_capacity_prompt=3, template_tail=S - W))[0] == list(range(S))


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_within_the_budget_is_whole_whatever_its_tail(name):
    assert positions(compress(name, *qkv(B), template_tail=B - 2)) == [list(range(B))] * 6


@pytest.mark.parametrize("tail", [-1, S])
def test_a_tail_outside_the_prompt_is_refused(tail):
    with pytest.raises(ValueError, match=f"template_tail={tail} is not from 0 to {S - 1}"):
        compress("snapkv", *qkv(), template_tail=tail)


def test_methods_without_a_window_refuse_it():
    with pytest.raises(
        ValueError, match="template_tail=3 is not read by StreamingLLM, which has no observation window"
    ):
        compress_prompt("streamingllm", *qkv(), max_capacity_prompt=B, template_tail=3)
    model = shared_model("llama")
    attach(model, "h2o", max_capacity_prompt=16)
    try:
        with pytest.raises(ValueError, match="template_tail=3 is not read by H2O"):
            generate(model, random_prompt(40), 2, template_tail=3)
    finally:
        detach(model)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", METHODS)
def test_whole_models_store_what_is_declared_and_both_loops_agree(name, granularity):
    model, prompts, tails = shared_model("llama"), [random_prompt(61), random_prompt(90)], [11, 0]
    attach(model, name.split("-")[0], kv_cache_granularity=granularity, **options(name))
    try:
        together = generate(model, prompts, 5, eos_token_id=[], template_tail=tails)
        hf = generate(model, prompts, 5, eos_token_id=[], decode="hf", template_tail=tails)
        alone = [
            generate(model, ids, 5, eos_token_id=[], template_tail=t).rows[0]
            for ids, t in zip(prompts, tails, strict=True)
        ]
    finally:
        detach(model)
    for i, tail in enumerate(tails):
        for row in (together.rows[i], hf.rows[i], alone[i]):
            assert row.tokens == alone[i].tokens
            assert row.cache.context(None).template_tail == tail and row.cache.compressed
            assert row.cache.kept_tokens == alone[i].cache.kept_tokens
            check_compression(row.cache, "example")


def test_the_cache_of_a_model_holds_the_moved_window():
    model, tail = shared_model("llama"), 11
    attachment = attach(model, "snapkv", **options("snapkv"))
    try:
        held = []
        for t in (tail, 0):
            cache = attachment.new_cache(max_new_tokens=1, template_tail=t)
            cache.record_positions = True
            step(model, random_prompt(90), cache)
            held.append([layer.store.positions for layer in cache.kv_layers])
    finally:
        detach(model)
    for moved, usual in zip(*held, strict=True):
        assert moved[..., -(W + tail) :].unique(dim=1).flatten().tolist() == list(range(90 - W - tail, 90))
        assert not torch.equal(moved, usual)


def test_a_budget_in_bytes_counts_a_tail_on_top():
    """HeadKV's window and tail come on top of B, so B must be smaller for the same bytes."""
    model = shared_model("llama")
    attach(model, "headkv", head_path="uniform", window_size=W, budget_bytes=50, kv_cache_granularity="kv_head")
    try:
        held = [generate(model, random_prompt(90), 1, eos_token_id=[], template_tail=t).cache for t in (11, 0)]
    finally:
        detach(model)
    assert [cache.kept_tokens for cache in held] == [[[45] * len(heads) for heads in held[0].kept_tokens]] * 2
    assert [cache.context(None).budget for cache in held] == [45 - W - 11, 45 - W]


def test_counts_of_tails_must_fit_the_prompts():
    model = shared_model("llama")
    attach(model, "snapkv", **options("snapkv"))
    try:
        with pytest.raises(ValueError, match="3 template tails for 2 prompts"):
            generate(model, [random_prompt(60)] * 2, 2, template_tail=[1, 2, 3])
    finally:
        detach(model)
