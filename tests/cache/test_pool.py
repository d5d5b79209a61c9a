"""Spans, and rows in them: what a cache gets back is what it had, with its new tokens, wherever it lay meanwhile."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import random_prompt, shared_model, step

from kvfactory import attach, detach
from kvfactory.cache.batch import BatchCache
from kvfactory.cache.pool import Arena, DecodePool, declared_span, span_size
from kvfactory.cache.ragged import RaggedStore

NEW = 6


def test_spans_are_taken_first_fit_and_joined_when_freed():
    arena = Arena(100)
    a, b, c = arena.take(40), arena.take(30), arena.take(30)
    assert (a, b, c) == (0, 40, 70) and arena.take(1) is None
    arena.give(a, 40)
    assert arena.take(50) is None
    arena.give(b, 30)
    assert arena.take(65) == 0 and arena.take(6) is None and arena.take(5) == 65


def test_spans_never_overlap():
    """Against a list of slots, in random order."""
    draw, arena, owner, spans = random.Random(5), Arena(97), [None] * 97, {}
    for i in range(600):
        if spans and draw.random() < 0.5:
            key = draw.choice(list(spans))
            start, size = spans.pop(key)
            arena.give(start, size)
            owner[start : start + size] = [None] * size
        size = draw.randint(1, 30)
        start = arena.take(size)
        fits = [j for j in range(98 - size) if not any(x is not None for x in owner[j : j + size])]
        assert start == (fits[0] if fits else None)
        if start is not None:
            owner[start : start + size] = [i] * size
            spans[i] = (start, size)
    for start, size in spans.values():
        arena.give(start, size)
    assert arena._free == [(0, 97)]


def test_a_layer_without_room_takes_nothing_anywhere():
    pool = DecodePool(2, 1, [50, 20, 50], torch.zeros(1, 4))
    assert not pool.reserve(0, [30, 30, 30])
    assert pool.reserve(0, [50, 20, 50]) and not pool.reserve(1, [1, 1, 1])
    pool.free(0)
    assert pool.reserve(1, [50, 20, 50])


@pytest.fixture
def model():
    model = shared_model("llama")
    yield model
    detach(model)


def filled(model, tokens, **options):
    """A cache after a prompt; the attachment is the model's."""
    cache = model.__dict__["_kvfactory_attachment"].new_cache(max_new_tokens=NEW, **options)
    step(model, random_prompt(tokens, seed=tokens), cache)
    return cache


def held(cache):
    """Everything that a cache says and holds, apart from where."""
    stores = [layer.store for layer in cache.kv_layers]
    bytes_ = cache.bytes()
    return (
        [tuple(x.tolist() for x in store.view()) for store in stores],
        [None if store.positions is None else store.positions.tolist() for store in stores],
        (bytes_.used, bytes_.aux, cache.kept_tokens, cache.get_seq_length(), cache.nbytes),
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("method", ["snapkv", "adakv", "fullkv"])
def test_a_row_leaves_the_pool_as_it_entered(model, method, granularity, keep):
    """Beside another row, in a pool of query heads; positions, where they are recorded, come along."""
    attachment = attach(model, method, max_capacity_prompt=24, kv_cache_granularity=granularity)
    attachment.record_positions = True
    heads = attachment.heads[0]
    caches = [filled(model, n) for n in (40, 55)]
    before = [held(cache) for cache in caches]
    like = caches[0].kv_layers[0].store.buffers[0]
    pool = DecodePool(3, heads, [2000] * 3, like)
    for place, cache in zip((2, 0), caches, strict=True):
        sizes = [span_size(layer.store, NEW - 1) for layer in cache.kv_layers]
        assert pool.reserve(place, sizes)
        pool.place(place, cache, NEW - 1)
        assert all(layer.store is None for layer in cache.kv_layers)
    lengths = pool.lengths.view(3, 3, heads)
    assert not lengths[:, 1].any() and lengths[:, 0].all() and lengths[:, 2].all()
    for place, cache, old in zip((2, 0), caches, before, strict=True):
        seen = cache.get_seq_length()
        pool.release(place, cache, seen, keep)
        assert held(cache) == old
        inside = cache.kv_layers[0].store.buffers[0].untyped_storage().data_ptr() == pool.keys[0].data_ptr()
        assert inside is not keep
    assert not pool.lengths.any()


def test_a_row_that_was_copied_out_enters_again_with_room(model):
    """As when a larger pool is built: tokens appended there do not run into the next head's segment."""
    attachment = attach(model, "snapkv", max_capacity_prompt=24, kv_cache_granularity="kv_head")
    attachment.record_positions = True
    cache = filled(model, 40)
    like = cache.kv_layers[0].store.buffers[0]
    before, positions = held(cache)[0], held(cache)[1]
    for appended in (2, 3):
        seen, room = cache.get_seq_length(), NEW - 1 - (cache.get_seq_length() - 40)
        sizes = [span_size(layer.store, room) for layer in cache.kv_layers]
        pool = DecodePool(1, 2, sizes, like)
        assert pool.reserve(0, sizes)
        pool.place(0, cache, room)
        starts, lengths = pool.starts[0], pool.lengths[0]
        for _ in range(appended):
            for layer in range(3):
                pool.keys[layer][pool.starts[layer] + pool.lengths[layer]] = 7.0
            pool.lengths += 1
        assert bool((starts[1:] >= starts[:-1] + lengths[:-1]).all())
        pool.release(0, cache, seen + appended, keep=True)
    after = held(cache)
    assert after[1] == positions and cache.get_seq_length() == 45 and cache.kept_tokens == [[24, 24]] * 3
    for (k, v), (old_k, old_v) in zip(after[0], before, strict=True):
        for head in range(2):
            assert k[0][head][:24] == old_k[0][head] and v[0][head][:24] == old_v[0][head]
            assert k[0][head][24:] == [[7.0] * len(k[0][head][0])] * 5


@pytest.mark.parametrize("method", ["snapkv", "adakv", "streamingllm", "fullkv", "pyramidkv"])
def test_what_is_declared_holds_what_is_stored(model, method):
    attach(model, method, max_capacity_prompt=24)
    for tokens in (20, 40, 55):
        cache = filled(model, tokens)
        for layer in cache.kv_layers:
            assert declared_span(layer, tokens, NEW) >= span_size(layer.store, NEW - 1)


def test_the_prompt_fills_a_span_that_has_the_slots(model):
    attachment = attach(model, "snapkv", max_capacity_prompt=24, kv_cache_granularity="kv_head")
    expected = held(filled(model, 40))
    for slots, inside in ((2 * (24 + NEW), True), (2 * (24 + NEW) - 1, False)):
        cache = attachment.new_cache(max_new_tokens=NEW)
        dims = cache.kv_layers[0].slot.module.head_dim
        spans = [tuple(torch.full((slots, dims), 3.0) for _ in range(2)) for _ in range(3)]
        for layer, span in zip(cache.kv_layers, spans, strict=True):
            layer.span = span
        step(model, random_prompt(40, seed=40), cache)
        assert held(cache) == expected
        assert (cache.kv_layers[0].store.buffers[0].data_ptr() == spans[0][0].data_ptr()) is inside


def test_recorded_positions_survive_a_batch(model):
    attachment = attach(model, "snapkv", max_capacity_prompt=24)
    attachment.record_positions = True
    caches = [filled(model, n) for n in (40, 55, 61)]
    before = [held(cache) for cache in caches]
    batch = BatchCache(attachment)
    batch.regroup([], caches[:2], NEW)
    batch.regroup([1], caches[2:], NEW)
    batch.regroup([], [], NEW)
    assert [held(cache) for cache in caches] == before
    assert all(isinstance(layer.store, RaggedStore) for cache in caches for layer in cache.kv_layers)
