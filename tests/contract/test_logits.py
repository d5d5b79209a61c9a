"""What is computed: decode logits equal a stock model that cannot see the dropped tokens."""

from __future__ import annotations

import pytest
import torch
from contract_cases import (
    ALL,
    BUDGET,
    DROPPING,
    EVICTING,
    GRANULARITIES,
    MASKABLE,
    PROMPT,
    attached,
    capability,
    held,
    logits_of,
    method_granularity,
    options,
    run,
    same,
    step,
)
from oracles import masked_logits, record_kept
from tiny import random_prompt, shared_model

from kvfactory import compress_prompt

# Logits are of magnitude 10 and float32 carries 24 bits; the two sides sum in different orders over 3 layers.
CLOSE = dict(rtol=0, atol=1e-4)
LATER = [1, 1, 1, 5, 1, 3]  # single tokens, then turns of several, then a token again


def _chunks(lengths=LATER):
    return [random_prompt(n, seed=100 + i) for i, n in enumerate(lengths)]


def _against_oracle(model, method, granularity, backend, prompt, **more):
    """(ours, oracle, stock) logits of the later chunks."""
    with (
        attached(model, method, kv_cache_granularity=granularity, attn_implementation=backend, **more) as attachment,
        torch.no_grad(),
    ):
        cache = attachment.new_cache(example_id="e", max_new_tokens=3)
        with record_kept(cache) as masks:
            step(model, prompt, cache)
        ours = [step(model, chunk, cache) for chunk in _chunks()]
        layers = [slot.model_layer for slot in attachment.slots]
    assert len(masks) == len(layers)
    return (
        ours,
        masked_logits(model, prompt, _chunks(), dict(zip(layers, masks, strict=True))),
        masked_logits(model, prompt, _chunks(), {}),
        masks,
    )


@method_granularity(MASKABLE)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "llama-9-heads", "qwen3", "qwen2-mixed-sliding"])
def test_decode_equals_a_stock_model_that_cannot_see_dropped_tokens(method, granularity, backend, name):
    """Chunks of one and of several tokens: a later turn sees all that is stored and is causal in itself."""
    model = shared_model(name)
    try:
        ours, oracle, stock, masks = _against_oracle(model, method, granularity, backend, random_prompt(PROMPT))
    except AssertionError as reason:
        if "are replaced" in str(reason):
            pytest.skip(f"{method} rewrites keys or values: no mask describes it")
        raise
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert any(mask is not None and not mask.all() for mask in masks)
    # The oracle itself is blunted: what was dropped matters, so an uncompressed cache would not pass.
    assert max(float((a - b).abs().max()) for a, b in zip(ours, stock, strict=True)) > 100 * CLOSE["atol"]


@method_granularity(EVICTING)
@pytest.mark.parametrize("name", ["llama-9-heads", "qwen2-mixed-sliding"])
def test_the_model_selects_what_compress_prompt_selects(method, granularity, name):
    """Same tensors, scale, layer and number of compressible layers: the model adds nothing of its own."""
    model = shared_model(name)
    seen = []
    with attached(model, method, kv_cache_granularity=granularity) as attachment, torch.no_grad():
        cache = attachment.new_cache(example_id="e")
        for layer in cache.kv_layers:
            inner = layer.cluster.before_attend

            def before(q, k, v, ctx, inner=inner):
                seen.append((q.clone(), k.clone(), v.clone()))
                return inner(q, k, v, ctx)

            layer.cluster.before_attend = before
        step(model, random_prompt(PROMPT), cache)
        stores = held(cache)
        for layer in cache.kv_layers:
            del layer.cluster.before_attend
    assert len(seen) == len(stores) == 3
    for index, (tensors, (keys, values)) in enumerate(zip(seen, stores, strict=True)):
        kept = compress_prompt(
            method,
            *tensors,
            layer_idx=index,
            num_layers=3,
            example_id="e",
            **options(method, kv_cache_granularity=granularity),
        )
        copies = len(kept.keys[0]) // keys.shape[1]
        for head in range(keys.shape[1]):
            rows = kept.keys[0][head * copies]
            assert torch.equal(keys[0, head, : len(rows)], rows)
            assert torch.equal(values[0, head, : len(rows)], kept.values[0][head * copies])


@method_granularity(EVICTING)
def test_granularity_shows_in_the_selection(method, granularity):
    """query_head: the heads of a group differ; kv_head and methods that are the same for all heads: they do not."""
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
        per_query_head = granularity == "query_head" and not capability(method).same_for_all_heads
        stored = [layer.store.view()[0][0] for layer in cache.kv_layers if len(layer.store.prompt_slots) == 6]
        assert bool(stored) == per_query_head
        if per_query_head:
            assert not all(torch.equal(k[3 * g], k[3 * g + i]) for k in stored for g in range(2) for i in (1, 2))


@method_granularity(ALL)
def test_prompt_logits_are_those_of_the_stock_model(method, granularity):
    """Selection of a layer never changes the prompt pass (what leaks on purpose says so by `before_attend`)."""
    model, prompt = shared_model("llama"), random_prompt(PROMPT)
    with torch.no_grad():
        want = model(prompt[None]).logits[0]
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        got, cache = logits_of(model, attachment, prompt, [])
        if not cache.kv_layers[0].cluster.changes_prompt:
            assert torch.equal(got[0], want)


@method_granularity(ALL)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_eager_and_sdpa_agree(method, granularity, name):
    model, prompt = shared_model(name), random_prompt(PROMPT)
    logits, caches = [], []
    for backend in ("eager", "sdpa"):
        with attached(model, method, kv_cache_granularity=granularity, attn_implementation=backend) as attachment:
            got, cache = logits_of(model, attachment, prompt, _chunks([1, 1, 4]))
        logits.append(got)
        caches.append(cache)
    assert caches[0].kept_tokens == caches[1].kept_tokens
    for a, b in zip(*logits, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("method", ALL)
def test_one_query_head_per_kv_head_makes_granularities_equal(method):
    model, prompt = shared_model("llama-mha"), random_prompt(PROMPT)
    results = []
    for granularity in GRANULARITIES:
        with attached(model, method, kv_cache_granularity=granularity) as attachment:
            got, cache = logits_of(model, attachment, prompt, _chunks())
            results.append((got, held(cache), cache.nbytes))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert same(results[0][1], results[1][1]) and results[0][2] == results[1][2]


@pytest.mark.parametrize("method", [m for m in DROPPING if not capability(m).same_for_all_heads])
def test_sum_and_mean_select_alike_and_max_is_read(method):
    """sum is G times mean, so ranks agree; max must reach methods that score by queries and leave others alone."""
    model = shared_model("llama-one-kv-head")
    max_differs = False
    for seed in range(5):
        stores = {}
        for how in ("mean", "sum", "max"):
            with attached(model, method, kv_cache_granularity="kv_head", gqa_score_agg=how) as attachment:
                stores[how] = held(logits_of(model, attachment, random_prompt(PROMPT, seed=seed), [])[1])
        # Noise on top of scores, and budgets that round once more, may tip a tie by the last bit of a factor G.
        if not capability(method).randomised and capability(method).budget_means != "mean over heads":
            assert same(stores["mean"], stores["sum"])
        max_differs |= not same(stores["mean"], stores["max"])
    assert max_differs == capability(method).reads_queries


@method_granularity(DROPPING)
def test_budget_and_prompt_reach_the_result(method, granularity):
    """A smaller budget stores less, and compressed logits are not FullKV's."""
    model, prompt = shared_model("llama"), random_prompt(PROMPT)
    full = run(model, "FullKV", prompt, new=2)
    sizes = []
    for budget in (16, BUDGET, 40):
        out = run(model, method, prompt, new=2, budget=budget, kv_cache_granularity=granularity)
        sizes.append(out.cache.nbytes)
    assert sizes == sorted(set(sizes))
    if granularity == "kv_head" or capability(method).same_for_all_heads:
        assert sizes[-1] < full.cache.nbytes
