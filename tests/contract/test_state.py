"""Nothing carries over: between examples, attachments, refused calls, or from order and shards of a data set."""

from __future__ import annotations

import copy

import pytest
import torch
from contract_cases import (
    ALL,
    PROMPT,
    RANDOMISED,
    attached,
    held,
    logits_of,
    method_granularity,
    options,
    run,
    same,
    step,
)
from tiny import random_prompt, shared_model, tiny_model

from kvfactory import attach, detach, generate
from kvfactory.monkeypatch import ATTENTION_NAME, get_attachment, restore

DRAWING = {"Scissorhands": {"scissor_select": "prob"}}
"""Settings with which a method draws, where its default does not."""
LONG, SHORT = random_prompt(PROMPT), random_prompt(37, seed=7)


@method_granularity(ALL)
@pytest.mark.parametrize("decode", ["loop", "hf"])
def test_two_examples_in_a_row_equal_two_fresh_runs(method, granularity, decode):
    """Long then short then long again: a frozen length, budget, counter or buffer would show."""
    fresh = []
    for prompt in (LONG, SHORT):
        out = run(tiny_model("llama"), method, prompt, decode=decode, kv_cache_granularity=granularity)
        fresh.append((out.sequences.tolist(), held(out.cache), out.cache.nbytes))
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity):
        for which in (0, 1, 0):
            out = generate(model, (LONG, SHORT)[which], 6, eos_token_id=[], decode=decode, example_id="e")
            assert out.sequences.tolist() == fresh[which][0]
            assert same(held(out.cache), fresh[which][1]) and out.cache.nbytes == fresh[which][2]


@method_granularity(ALL)
def test_two_caches_alive_at_once(method, granularity):
    """Forwards of two generations interleaved on one model equal the two one after the other."""
    model = shared_model("llama")
    later = [random_prompt(1, seed=i) for i in range(3)]
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        want = [logits_of(model, attachment, p, later)[0] for p in (LONG, SHORT)]
        caches = [attachment.new_cache(example_id="e") for _ in range(2)]
        got = [[step(model, p, c)] for p, c in zip((LONG, SHORT), caches, strict=True)]
        for token in later:
            for out, cache in zip(got, caches, strict=True):
                out.append(step(model, token, cache))
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", ALL)
def test_a_cache_that_was_reset_is_fresh(method):
    model = shared_model("llama")
    with attached(model, method) as attachment:
        want, cache = logits_of(model, attachment, SHORT, [LONG[:1]])
        first = held(cache)
        _, cache = logits_of(model, attachment, LONG, [])
        cache.reset()
        got = [step(model, SHORT, cache), step(model, LONG[:1], cache)]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert same(held(cache), first)


def _anatomy(model) -> dict[str, set[str]]:
    """Attribute names of every module, and its hooks."""
    return {
        name: set(module.__dict__) | {f"{k}:{len(v)}" for k, v in module.__dict__.items() if "hooks" in k}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed-sliding"])
def test_detach_gives_stock_back_and_leaves_nothing_behind(method, name):
    model, prompt = tiny_model(name.split("-")[0], **_changes(name)), LONG[None]
    with torch.no_grad():
        want = model(prompt).logits
    tokens = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    before, config = _anatomy(model), copy.deepcopy(model.config)
    attach(model, method, **options(method))
    generate(model, LONG, 3)
    detach(model)
    assert _anatomy(model) == before
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, want)
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0), tokens)


def _changes(name):
    from tiny import SHAPES

    return SHAPES.get(name, {})


@pytest.mark.parametrize("method", ALL)
def test_attaching_twice_and_detaching_twice_raise(method):
    model = tiny_model("llama")
    attach(model, method, **options(method))
    with pytest.raises(ValueError, match=f"{method} is attached to this model already"):
        attach(model, "FullKV")
    restore()
    assert get_attachment(model) is None and model.config._attn_implementation != ATTENTION_NAME
    with pytest.raises(ValueError, match="no method is attached"):
        detach(model)
    with pytest.raises(ValueError, match="no method is attached"):
        generate(model, LONG, 3)


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("use_cache", [None, False])
def test_a_forward_without_cache_equals_stock(method, use_cache):
    model, flags = shared_model("llama"), {} if use_cache is None else {"use_cache": use_cache}
    with torch.no_grad():
        want = model(LONG[None], **flags).logits
        with attached(model, method):
            assert torch.equal(model(LONG[None], **flags).logits, want)
            generate(model, LONG, 3)
            assert torch.equal(model(LONG[None], **flags).logits, want)


@pytest.mark.parametrize("method", ALL)
def test_a_refused_forward_leaves_no_trace(method):
    """A call that fails inside the first attention layer must not bind that layer to a dead cache."""
    model = shared_model("llama")
    with torch.no_grad():
        want = model(LONG[None], use_cache=False).logits
    with attached(model, method) as attachment:
        expected = generate(model, LONG, 4, eos_token_id=[]).sequences
        backend = attachment.slots[0].backend

        def broken(*args, **kwargs):
            raise torch.OutOfMemoryError("no memory left")

        for slot in attachment.slots[:2]:
            slot.backend = broken
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, LONG, 4)
        for slot in attachment.slots[:2]:
            slot.backend = backend
        assert all(slot.bound is None for slot in attachment.slots)
        with torch.no_grad():
            assert torch.equal(model(LONG[None], use_cache=False).logits, want)
        assert torch.equal(generate(model, LONG, 4, eos_token_id=[]).sequences, expected)


@method_granularity(RANDOMISED)
def test_draws_depend_on_seed_example_and_layer_alone(method, granularity):
    """Any order, any shard, whatever the global generator did before: the same selection for the same example."""
    model, prompts = shared_model("llama"), {str(i): random_prompt(PROMPT, seed=i) for i in range(4)}

    more = {"kv_cache_granularity": granularity, **DRAWING.get(method, {})}

    def stores(names, seed=42):
        found = {}
        with attached(model, method, seed=seed, **more):
            for name in names:
                torch.rand(3)
                found[name] = held(generate(model, prompts[name], 1, eos_token_id=[], example_id=name).cache)
        return found

    whole = stores(["0", "1", "2", "3"])
    for shard in (["3", "1"], ["2", "0"]):
        for name, store in stores(shard).items():
            assert same(store, whole[name])
    assert not same(stores(["0"], seed=43)["0"], whole["0"])
    with attached(model, method, **more):
        other = held(generate(model, prompts["0"], 1, eos_token_id=[], example_id="other").cache)
    assert not same(other, whole["0"])


@pytest.mark.parametrize("method", [m for m in ALL if m not in RANDOMISED])
def test_other_methods_draw_nothing(method):
    model = shared_model("llama")
    state = torch.get_rng_state()
    stores = [held(run(model, method, LONG, new=1, seed=seed).cache) for seed in (1, 2)]
    assert same(*stores)
    assert torch.equal(torch.get_rng_state(), state)
