"""What is stored: exactly what the method declares, its own copy, and everything at full budget."""

from __future__ import annotations

import gc

import pytest
import torch
from contract_cases import ALL, BUDGET, DROPPING, PROMPT, attached, capability, logits_of, method_granularity, step
from tiny import random_prompt, shared_model

from kvfactory.cache.kv_cache import KVLayer
from kvfactory.methods import METHODS


@method_granularity(ALL)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_full_budget_is_fullkv_bit_for_bit(method, granularity, backend):
    model, prompt = shared_model("llama"), random_prompt(PROMPT)
    later = [random_prompt(1, seed=i) for i in range(4)]
    with attached(model, "FullKV", attn_implementation=backend) as attachment:
        want, full = logits_of(model, attachment, prompt, later)
    for budget in (PROMPT, PROMPT + 13):
        if capability(method).budget_means == "tokens attended":
            budget += len(later)
        with attached(
            model, method, budget=budget, kv_cache_granularity=granularity, attn_implementation=backend
        ) as attachment:
            got, cache = logits_of(model, attachment, prompt, later)
        if METHODS.get(method).before_attend is not METHODS.get("FullKV").before_attend:
            got, expected = got[:1], want[:1]  # what such a method stores may differ even when nothing is dropped
        else:
            expected = want
            assert not cache.compressed and cache.nbytes == full.nbytes
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@method_granularity(ALL)
@pytest.mark.parametrize("name", ["llama", "llama-9-heads", "qwen2-mixed-sliding"])
def test_stored_slots_and_bytes_are_as_declared(method, granularity, name):
    model = shared_model(name)
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
        ctx, used = cache.context(None), 0
        for layer in cache.kv_layers:
            slots = layer.store.prompt_slots
            assert layer.cluster.mismatch(slots, ctx) is None
            shape = layer.cluster.shape
            whole = all(n == PROMPT for n in slots)
            # Compressed layers store one copy per head of the granularity, whole ones never more than kv heads.
            heads = shape.num_kv_heads if whole else layer.cluster.stored_heads
            assert len(slots) == heads
            used += sum(slots) * 2 * shape.head_dim * 4
        native = sum(x.numel() * 4 for layer in cache.native_layers for x in (layer.keys, layer.values))
        assert cache.bytes().used == used + native
        assert cache.nbytes == used + native + cache.bytes().aux
        assert (
            cache.full_bytes()
            == sum(2 * c.shape.num_kv_heads * c.shape.head_dim * PROMPT * 4 for c in _clusters(cache)) + native
        )
        assert cache.compressed == (method in DROPPING)


def _clusters(cache):
    return [layer.cluster for layer in cache.kv_layers]


@method_granularity([m for m in ALL if capability(m).budget_means == "slots per head"])
def test_exactly_the_budget_per_stored_head(method, granularity):
    """Written without `declared`, so that a method cannot move its own goalposts: B per head, or a whole layer."""
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
    whole = {i for i, layer in enumerate(cache.kept_tokens) if set(layer) == {PROMPT}}
    assert whole == (set(METHODS.get(method).Settings().skip_layers) if method == "L2Norm" else set())
    assert all(set(layer) == {BUDGET} for i, layer in enumerate(cache.kept_tokens) if i not in whole)


@method_granularity(ALL)
def test_decoded_tokens_are_appended_once_per_stored_head(method, granularity):
    """Also beyond the slack of the buffers: 3 free slots, 7 tokens one by one, then 4 at once."""
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
        kept, bytes_prompt = cache.kept_tokens, cache.bytes().used
        for i in range(7):
            step(model, random_prompt(1, seed=i), cache)
        step(model, random_prompt(4), cache)
        assert cache.kept_tokens == kept
        heads = sum(len(layer) for layer in kept)
        assert cache.bytes().used == bytes_prompt + 11 * heads * 2 * 16 * 4
        assert cache.get_seq_length() == PROMPT + 11


def reachable_storages(root) -> dict[int, int]:
    """{address: bytes} of every tensor storage reachable from the layers of a cache, the model's own excluded."""
    stack, seen, found = [layer.__dict__ for layer in root.layers], set(), {}
    stop = (torch.nn.Module, type, type(gc))
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, stop):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack.extend(v for k, v in item.items() if k not in ("cache", "slot"))
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        elif callable(item) and getattr(item, "__closure__", None):
            stack.extend(cell.cell_contents for cell in item.__closure__)
        elif hasattr(item, "__dict__"):
            stack.append(item.__dict__)
    return found


def _excess(cache) -> int:
    """Reachable bytes beyond what the cache admits to hold, bookkeeping of a few numbers per head aside."""
    total = sum(reachable_storages(cache).values())
    held = cache.bytes()
    return total - held.alloc - held.aux


BOOKKEEPING = 3 * 6 * 16 * 8
"""Bytes of lengths, starts and scores per stored head that no store counts: 3 layers, 6 heads, 16 int64 each."""


@method_granularity(ALL)
def test_nothing_of_the_full_prompt_stays_reachable(method, granularity):
    """A view of the full keys would keep all of them alive: 3 layers of 61 tokens are 46,848 bytes."""
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
        assert _excess(cache) <= BOOKKEEPING
        held = cache.bytes()
        assert held.used <= held.alloc
        slack = sum(len(heads) for heads in cache.kept_tokens) * 3 * 2 * 16 * 4
        assert held.alloc == held.used + slack


def test_a_kept_view_is_found(monkeypatch):
    """The check above must be able to fail: a layer that remembers a slice of the prompt's keys is caught."""
    model = shared_model("llama")
    honest = KVLayer.finish_prompt

    def leaky(self, q, k, v):
        honest(self, q, k, v)
        self.last_keys = k[:, :, -2:]

    monkeypatch.setattr(KVLayer, "finish_prompt", leaky)
    with attached(model, "SnapKV") as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
        assert _excess(cache) > BOOKKEEPING


@method_granularity(DROPPING)
def test_compress_leaves_its_inputs_alone_and_owns_nothing_of_them(method, granularity):
    """One prompt pass feeds several methods, so a method may not write into the tensors it is given."""
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        cache = attachment.new_cache(example_id="e")
        for layer in cache.kv_layers:
            inner = layer.finish_prompt

            def watched(q, k, v, inner=inner):
                copies = [x.clone() for x in (q, k, v)]
                inner(q, k, v)
                assert all(torch.equal(x, c) for x, c in zip((q, k, v), copies, strict=True))

            layer.finish_prompt = watched
        step(model, random_prompt(PROMPT), cache)


@method_granularity([m for m in ALL if capability(m).same_for_all_heads])
def test_same_content_is_stored_once_in_either_granularity(method, granularity):
    model = shared_model("llama")
    with attached(model, method, kv_cache_granularity=granularity) as attachment:
        _, cache = logits_of(model, attachment, random_prompt(PROMPT), [])
    assert all(len(heads) == 2 for heads in cache.kept_tokens)
