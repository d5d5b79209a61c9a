"""Decode-time eviction on whole models: FullKV below the budget, never above it, counted, re-indexed, refused.

Steps are checked token by token in methods/test_evictor.py.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from storages import reachable_storages
from tiny import SHAPES, random_prompt, shared_model, step, tiny_model

from kvfactory import attach, detach, generate
from kvfactory.methods import METHODS


def run(name, method, prompts, new=8, **options):
    model = shared_model(name)
    attach(model, method, **options)
    try:
        return [generate(model, p, new, eos_token_id=[], example_id=str(i)) for i, p in enumerate(prompts)]
    finally:
        detach(model)


EVICTING = {
    "H2O": dict(preset="paper"),
    "StreamingLLM": dict(preset="paper"),
    "L2Norm": dict(decode_evict=True),
    "Scissorhands": dict(preset="paper"),
    "CAM": dict(preset="paper", window_size=6),
}
on_models = pytest.mark.parametrize("method", EVICTING)


def test_every_method_with_the_switch_is_here():
    switched = [m for m in METHODS.names() if any(f.name == "decode_evict" for f in fields(METHODS.get(m).Settings))]
    assert sorted(switched) == sorted(EVICTING)


@on_models
@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
def test_below_the_budget_it_is_fullkv(method, granularity):
    """Prompt and new tokens together fit: nothing is dropped, logits and bytes per head are FullKV's."""
    model, prompt, later = shared_model("llama"), random_prompt(21), random_prompt(9, seed=5)
    logits, caches = {}, {}
    for name, options in (("FullKV", {}), (method, EVICTING[method])):
        attachment = attach(model, name, max_capacity_prompt=30, kv_cache_granularity=granularity, **options)
        try:
            caches[name] = attachment.new_cache(example_id="e", max_new_tokens=9)
            logits[name] = [step(model, x, caches[name]) for x in (prompt, *later.split(1))]
        finally:
            detach(model)
    for a, b in zip(logits["FullKV"], logits[method], strict=True):
        if granularity == "kv_head":
            assert torch.equal(a, b)
        else:  # each query head reads its own copy: other matrix shapes, logits of magnitude 10
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert not caches[method].compressed
    for layer in caches[method].kv_layers:
        assert layer.store.length == 30


@on_models
@pytest.mark.parametrize("length", [12, 20, 41])
def test_the_cache_never_exceeds_the_budget(method, length):
    """Nor does its memory: one slot more is allocated, for the token being attended."""
    model = shared_model("llama")
    attachment = attach(model, method, max_capacity_prompt=20, **EVICTING[method])
    try:
        cache = attachment.new_cache(example_id="e")
        step(model, random_prompt(length), cache)
        for i, token in enumerate(random_prompt(25, seed=3).split(1)):
            step(model, token, cache)
            assert cache.get_seq_length() == length + i + 1
            for number, layer in enumerate(cache.kv_layers):
                if method == "L2Norm" and number in (0, 1):
                    assert layer.store.length == length + i + 1
                    continue
                assert layer.store.length <= min(20, length + i + 1)
                assert method == "Scissorhands" or layer.store.length == min(20, length + i + 1)
                k, v = layer.store._k, layer.store._v
                assert k.shape[2] == v.shape[2] == 21
    finally:
        detach(model)


@on_models
def test_what_decoding_needs_is_counted(method):
    """Columns of the slots and rings of queries are auxiliary bytes; without the switch there are none."""
    options = {k: v for k, v in EVICTING[method].items() if k == "window_size"}
    off = run("llama", method, [random_prompt(41)], max_capacity_prompt=20, **options)[0].cache
    on = run("llama", method, [random_prompt(41)], max_capacity_prompt=20, **EVICTING[method])[0].cache
    assert off.bytes().aux == 0
    expected = 0
    for layer in on.kv_layers:
        heads, slots = (layer.store.view()[0].shape[i] for i in (1, 2))
        columns = {"H2O": 2, "StreamingLLM": 1, "L2Norm": 2, "Scissorhands": 1, "CAM": 2}[method]
        expected += heads * slots * columns * 4 if layer.store.columns else 0
        expected += {"Scissorhands": 400 * 6 * 17 * 4 + 2 * 400 * 8, "StreamingLLM": 2 * 4 * 16 * 4}.get(method, 0)
    assert on.bytes().aux == expected and on.nbytes == on.bytes().used + expected


@on_models
def test_nothing_else_stays_reachable(method):
    """A view of the prompt's keys, or of all kept ones, would keep more alive than is counted: 20 slots of keys at kv
    heads are 2,560 bytes a layer, and buffers have one slot beyond what is in use."""
    model = shared_model("llama")
    attachment = attach(model, method, max_capacity_prompt=20, **EVICTING[method])
    try:
        cache = attachment.new_cache(example_id="e")
        step(model, random_prompt(41), cache)
        held = cache.bytes()
        excess = sum(reachable_storages(cache.layers).values()) - held.alloc - held.aux
        slack = sum(4 * len(layer.cluster.declared(cache.context(None))) * 2 + 8 for layer in cache.kv_layers)
        assert 0 <= excess <= slack
    finally:
        detach(model)


@on_models
def test_a_later_turn_is_refused(method):
    model = shared_model("llama")
    attachment = attach(model, method, max_capacity_prompt=20, **EVICTING[method])
    try:
        cache = attachment.new_cache(example_id="e", max_new_tokens=5)
        step(model, random_prompt(41), cache)
        step(model, random_prompt(1), cache)
        before = [(layer.seen, layer.store.length) for layer in cache.kv_layers]
        with pytest.raises(ValueError, match="not possible with --decode_evict on"):
            step(model, random_prompt(2), cache)
        # "Pass them singly" must work on this very cache.
        assert [(layer.seen, layer.store.length) for layer in cache.kv_layers] == before
    finally:
        detach(model)


@on_models
def test_examples_do_not_see_each_other(method):
    """Two orders, and in a batch: the same tokens and the same stored numbers."""
    prompts = [random_prompt(41), random_prompt(29, seed=4)]
    first = run("llama", method, prompts, max_capacity_prompt=20, **EVICTING[method])
    model = shared_model("llama")
    attach(model, method, max_capacity_prompt=20, **EVICTING[method])
    try:
        second = [generate(model, prompts[i], 8, eos_token_id=[], example_id=str(i)) for i in (1, 0)][::-1]
    finally:
        detach(model)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.sequences, b.sequences)
        for x, y in zip(a.cache.kv_layers, b.cache.kv_layers, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(x.store.view(), y.store.view(), strict=True))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "llama-yarn"])
@pytest.mark.parametrize("evict", [True, False])
def test_reindexed_streaming_equals_a_stock_model_on_the_kept_tokens(family, evict, backend):
    """In a model of one layer, keys depend on their own token alone, so that positions inside the cache are those of a
    stock model that reads sinks, recent tokens and the new one as one contiguous prompt."""
    changes = {k: v for k, v in SHAPES.get(family, {}).items()} | dict(num_hidden_layers=1)
    model = tiny_model(family.split("-")[0], **changes)
    ids, length, sinks, budget = random_prompt(37 + 14), 37, 4, 16
    attachment = attach(
        model,
        "StreamingLLM",
        max_capacity_prompt=budget,
        attn_implementation=backend,
        decode_evict=evict,
        reindex_positions=True,
    )
    cache = attachment.new_cache(example_id="e", max_new_tokens=14)
    step(model, ids[:length], cache)
    got = [step(model, ids[i : i + 1], cache)[0] for i in range(length, len(ids))]
    detach(model)
    differs = 0
    for i, logits in enumerate(got, start=length):
        oldest = (i if evict else length) - (budget - sinks)
        kept = torch.cat([ids[:sinks], ids[oldest : i + 1]])
        with torch.no_grad():
            want = model(kept[None]).logits[0, -1]
            moved = torch.cat([torch.arange(sinks), torch.arange(oldest, i + 1)])
            original = model(kept[None], position_ids=moved[None]).logits[0, -1]
        # Keys of magnitude 1 rotated once more in float32; logits of magnitude 10.
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-3)
        differs += not torch.allclose(logits, original, rtol=0, atol=1e-2)
    assert differs > 7  # original positions are another model


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}])
def test_reindexing_needs_frequencies_that_do_not_change(scaling):
    model = tiny_model("llama", rope_scaling=scaling)
    attachment = attach(model, "StreamingLLM", max_capacity_prompt=16, preset="paper")
    with pytest.raises(ValueError, match="--reindex_positions off"):
        step(model, random_prompt(37), attachment.new_cache(example_id="e"))
