"""Errors while rows are replayed or share a batch: every row is handed out once, with its tokens or with the error."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from replaying import outcome, request, requests
from tiny import tiny_model

from kvfactory import attach, detach
from kvfactory import decoder as decoder_module
from kvfactory.cache.kv_cache import KVCache, KVLayer
from kvfactory.cache.pool import DecodePool
from kvfactory.decoder import Decoder
from kvfactory.graph_engine import GraphEngine
from kvfactory.loop_engine import LoopEngine
from kvfactory.plan import make_plan
from kvfactory.rows import Request


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def plan(model):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    yield attachment.plan
    detach(model)


def failing_once(monkeypatch, owner, name, at=1):
    """`owner.name` raises at its call number `at`."""
    inner, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("no memory")
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def collected(rows):
    found = {}
    for asked, row, _ in rows:
        assert asked.example_id not in found
        found[asked.example_id] = row
    return found


WORK = ((60, 12), (61, 3), (62, 5), (63, 9), (64, 4))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("at", [1, 2, 4, 9])
def test_a_step_that_fails_loses_the_rows_in_flight(model, plan, uncaptured, monkeypatch, at, keep):
    """Also the step that was launched before a row was known to have finished: that row is handed out all the same."""
    work = [request(plan, *sizes) for sizes in WORK]
    expected = {name: row.tokens for name, row in collected(Decoder(model, 1).run(work)).items()}
    failing_once(monkeypatch, GraphEngine, "_read", at)
    rows = collected(uncaptured(model, 2, keep_caches=keep).run(work))
    lost = [name for name, row in rows.items() if isinstance(row, Exception)]
    assert len(rows) == 5 and 1 <= len(lost) <= 2
    assert all(rows[name].tokens == tokens for name, tokens in expected.items() if name not in lost)


def test_a_row_that_finished_before_a_step_failed_is_not_lost(model, plan, uncaptured, monkeypatch):
    tokens = collected(Decoder(model, 1).run([request(plan, 60, 9)]))["60"].tokens
    steps = next(i for i in range(1, 9) if tokens[i] not in tokens[:i])
    failing_once(monkeypatch, GraphEngine, "_read", steps + 1)  # the step that ran ahead of the stop
    rows = collected(uncaptured(model, 2).run([request(plan, 60, 9, [tokens[steps]]), request(plan, 61, 9)]))
    assert rows["60"].tokens == tokens[: steps + 1] and isinstance(rows["61"], torch.OutOfMemoryError)


def test_a_row_that_cannot_be_copied_out_is_lost_with_the_error(model, plan, uncaptured, monkeypatch):
    failing_once(monkeypatch, DecodePool, "release", 2)
    rows = collected(uncaptured(model, 3).run([request(plan, *sizes) for sizes in WORK]))
    assert len(rows) == 5 and 1 <= sum(isinstance(row, Exception) for row in rows.values()) <= 3


@pytest.mark.parametrize("where", [(DecodePool, "place", 3), (GraphEngine, "_capture", 1), (GraphEngine, "_write", 2)])
def test_rows_that_cannot_enter_are_lost_and_later_ones_start_anew(model, plan, uncaptured, monkeypatch, where):
    work = [request(plan, *sizes) for sizes in WORK]
    expected = {name: row.tokens for name, row in collected(Decoder(model, 1).run(work)).items()}
    captures = failing_once(monkeypatch, *where)
    rows = collected(uncaptured(model, 2).run(work))
    lost = [name for name, row in rows.items() if isinstance(row, Exception)]
    assert len(rows) == 5 and 1 <= len(lost) <= 2
    assert all(rows[name].tokens == tokens for name, tokens in expected.items() if name not in lost)
    if where[1] == "_capture":  # a pool whose step was not captured would run it uncaptured ever after
        assert len(captures) >= 2


def test_rows_are_lost_with_their_error_when_no_pool_can_hold_them(model, plan, uncaptured, monkeypatch):
    decoder = uncaptured(model, 2)
    made = []

    def pool(*args):
        made.append(args)
        if len(made) in (2, 3):  # the roomy one, and the one that only just holds the rows
            raise torch.OutOfMemoryError("no memory")
        return DecodePool(*args)

    monkeypatch.setattr("kvfactory.graph_engine.DecodePool", pool)
    full = make_plan("fullkv")
    work = [request(full, n, new) for n, new in ((30, 20), (32, 3), (120, 5), (31, 4))]
    rows = collected(decoder.run(work))
    assert sorted(rows) == ["120", "30", "31", "32"]
    assert all(isinstance(rows[name], torch.OutOfMemoryError) for name in ("30", "120"))
    assert len(rows["32"].tokens) == 3 and len(rows["31"].tokens) == 4


def test_a_pool_that_just_holds_its_rows_where_memory_is_short(model, plan, uncaptured, monkeypatch):
    """A short prompt first, then a long one: room for as many long ones as there are places may be too much."""
    full = make_plan("fullkv")
    work = [request(full, n, new) for n, new in ((30, 9), (120, 12), (31, 4), (33, 5), (110, 3))]
    most = 3 * 180  # slots of a layer: a long row and two short ones, with room for their new tokens

    def pool(places, heads, sizes, like):
        if max(sizes) > most * 2:  # two kv heads
            raise torch.OutOfMemoryError("no memory")
        return DecodePool(places, heads, sizes, like)

    monkeypatch.setattr("kvfactory.graph_engine.DecodePool", pool)
    assert outcome(uncaptured(model, 3).run(work)) == outcome(Decoder(model, 1).run(work))


def test_pools_stop_growing(model, plan, uncaptured, monkeypatch):
    """Rows of very different length in any order: few pools, none larger than worst-fitting rows ask for."""
    made = []

    def pool(places, heads, sizes, like):
        made.append(max(sizes))
        return DecodePool(places, heads, sizes, like)

    monkeypatch.setattr("kvfactory.graph_engine.DecodePool", pool)
    full, decoder = make_plan("fullkv"), uncaptured(model, 3, keep_caches=False)
    lengths = [20 + 37 * i % 150 for i in range(60)]
    rows = list(decoder.run(Request(torch.arange(n) % 90 + 1, 2 + n % 5, 0, [], [full], str(n)) for n in lengths))
    assert len(rows) == 60 and not any(isinstance(row, Exception) for _, row, _ in rows)
    largest = 2 * (max(lengths) + 6)  # two kv heads, with room
    # A free span of the largest row's size is certain in a pool of 2 * places - 1 of them.
    assert len(made) <= 6 and max(made) <= 1.5 * 5 * largest


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_batch_that_memory_has_no_room_for_is_lost_not_the_run(model, plan, monkeypatch, at):
    work = [request(plan, *sizes) for sizes in WORK]
    expected = {key: row.tokens for key, row in collected(Decoder(model, 1).run(work)).items()}
    failing_once(monkeypatch, LoopEngine, "_regroup", at)
    rows = collected(Decoder(model, 2).run(work))
    lost = [key for key, row in rows.items() if isinstance(row, Exception)]
    assert len(rows) == 5 and 1 <= len(lost) <= 3
    assert all(rows[key].tokens == tokens for key, tokens in expected.items() if key not in lost)


def test_a_replayed_row_enters_where_looped_ones_were_lost(model, plan, uncaptured, monkeypatch):
    """No step runs ahead while there is room: the prompt that comes next may leave a replayed row."""
    looped = make_plan("h2o", max_capacity_prompt=40, decode_evict="on", preset="paper")
    work = [request(plan, 60, 9), request(looped, 61, 9), request(looped, 62, 9), request(plan, 63, 5)]
    failing_once(monkeypatch, LoopEngine, "_regroup", 1)
    rows = collected(uncaptured(model, 3).run(work))
    assert {name: isinstance(row, Exception) for name, row in rows.items()} == {
        "60": False,
        "61": True,
        "62": True,
        "63": False,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prompts_that_fail_or_end_at_once_leave_no_place_behind(model, plan, uncaptured, size):
    """Several methods a prompt, some of which cannot have their budget; first tokens that stop; one new token."""
    ratio = make_plan("snapkv", max_capacity_prompt_ratio=0.3)  # below the window for short prompts
    plans = [ratio, plan, make_plan("adakv", max_capacity_prompt=40), make_plan("fullkv")]
    first = collected(Decoder(model, 1).run([request(plan, 61, 9)]))["61"].tokens[0]
    work = requests([plan], (60, 61))
    for n, new, stops in ((60, 5, []), (21, 6, []), (61, 7, [first]), (22, 1, []), (75, 4, []), (40, 8, [])):
        work.append(Request(request(plan, n, new).ids, new, 0, stops, plans, f"{n}"))

    def figures(rows):
        """Once all rows are there, so that what the first ones hold would have been written over."""
        found = {}
        for asked, row, chosen in list(rows):
            key = asked.example_id, plans.index(chosen)
            assert key not in found
            if isinstance(row, Exception):
                found[key] = str(row)
                continue
            found[key] = row.tokens, row.finish, row.cache.bytes().used
            if len(row.tokens) == 1:
                found[key] += tuple(layer.store.view()[0].sum(2).tolist() for layer in row.cache.kv_layers)
        return found

    decoder = uncaptured(model, size)
    assert figures(decoder.run(work)) == figures(Decoder(model, 1).run(work))
    pool = decoder._graph._pool
    assert not pool._spans and not decoder._graph._reserved
    assert all(arena._free == [(0, arena.size)] for arena in pool._arenas)


def test_rows_that_wait_for_a_place_move_out_of_a_pool_that_goes(model, plan, uncaptured, monkeypatch):
    """A small plan's row waits with its place while a large one's makes a larger pool: the old one's memory is free."""
    attachment_plans = [make_plan("fullkv"), make_plan("snapkv", max_capacity_prompt=16), make_plan("fullkv")]
    work = [Request(request(plan, n, 6).ids, 6, 0, [], attachment_plans, str(n)) for n in (24, 25, 110, 26)]
    expected = {(a.example_id, id(p)): row.tokens for a, row, p in Decoder(model, 1).run(work)}
    caches, pools, moved = weakref.WeakSet(), [], []
    init = KVCache.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        caches.add(self)

    def pool(*args):
        stored = [layer.store for cache in caches for layer in cache.kv_layers if layer.store is not None]
        for old in pools[-1:]:
            moved.append(len(stored))
            held = {store.buffers[0].untyped_storage().data_ptr() for store in stored}
            assert not held & {keys.untyped_storage().data_ptr() for keys in old.keys}
        pools.append(DecodePool(*args))
        return pools[-1]

    monkeypatch.setattr(KVCache, "__init__", watched)
    monkeypatch.setattr("kvfactory.graph_engine.DecodePool", pool)
    for size in (1, 2, 3):
        pools.clear()
        rows = {(a.example_id, id(p)): row.tokens for a, row, p in uncaptured(model, size).run(work)}
        assert rows == expected
    assert moved and max(moved) > 0


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_row_that_was_handed_out_is_not_held(model, plan, uncaptured, monkeypatch, size, replayed):
    """Without the garbage collector: on a GPU nothing would call it while keys and values of finished rows pile up."""
    made, counts = weakref.WeakSet(), []
    init, forward = KVCache.__init__, decoder_module.forward

    def watched_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.add(self)

    def watched_forward(*args):
        counts.append(len(made))
        return forward(*args)

    monkeypatch.setattr(KVCache, "__init__", watched_init)
    monkeypatch.setattr(decoder_module, "forward", watched_forward)
    decoder = uncaptured(model, size) if replayed else Decoder(model, size)
    gc.collect()
    gc.disable()
    try:
        for asked, row, _ in decoder.run([request(plan, *sizes) for sizes in WORK]):
            del asked, row
    finally:
        gc.enable()
    assert len(counts) == 5 and max(counts) <= size


@pytest.mark.parametrize("keep", [True, False])
def test_a_prompt_that_fails_midway_gives_its_place_back(model, plan, uncaptured, monkeypatch, keep):
    """Some layers have filled their spans by then, others have nothing."""
    finish, calls = KVLayer.finish_prompt, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3 * 2 + 2:  # the third prompt's second of three layers
            raise torch.OutOfMemoryError("no memory")
        finish(self, *args, **kwargs)

    monkeypatch.setattr(KVLayer, "finish_prompt", failing)
    decoder = uncaptured(model, 2, keep_caches=keep)
    rows = collected(decoder.run([request(plan, *sizes) for sizes in WORK]))
    assert [name for name, row in rows.items() if isinstance(row, torch.OutOfMemoryError)] == ["62"]
    assert len(rows) == 5 and not decoder._graph._reserved and not decoder._graph._pool._spans
