"""The step that is captured on CUDA, run uncaptured on the CPU: the loop's tokens, rows that come and go, one pool."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from tiny import random_prompt, tiny_model

from kvfactory import attach, detach
from kvfactory.cache.pool import Arena, DecodePool
from kvfactory.decoder import Decoder
from kvfactory.graph_engine import GraphEngine
from kvfactory.graph_support import _of_method
from kvfactory.methods import METHODS
from kvfactory.plan import make_plan
from kvfactory.rows import Request
from kvfactory.verify_decode import DecodeMismatch, check_against_loop, first_difference

REPLAYABLE = ["fullkv", "snapkv", "streamingllm", "h2o", "l2norm", "pyramidkv", "adakv", "random"]
LENGTHS = (90, 33, 61, 120, 47, 75, 101)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def uncaptured(monkeypatch):
    """Lets the graph engine run on the CPU, where nothing can be captured."""
    monkeypatch.setattr("kvfactory.decoder.graph_obstacle", lambda attachment, plan, *_: _of_method(attachment, plan))
    monkeypatch.setattr("kvfactory.decoder.GraphEngine", partial(GraphEngine, capture=False))
    return partial(Decoder, graph=True)


def requests(plans, lengths=LENGTHS, new=9, stops=(), min_new=0):
    """Prompts of several lengths, each with its own number of new tokens."""
    found = [
        Request(random_prompt(n, seed=n), new + i % 3, min_new, list(stops), list(plans), f"example-{n}")
        for i, n in enumerate(lengths)
    ]
    random.Random(3).shuffle(found)
    return found


def outcome(rows):
    """What must not depend on who decodes: tokens, finish, what is stored and how much."""
    found = {}
    for request, row, plan in rows:
        if isinstance(row, Exception):
            raise row
        sizes = row.cache.bytes()
        key = (request.example_id, plan.method, plan.budget.tag)
        found[key] = (row.tokens, row.finish, sizes.used, sizes.aux, row.cache.kept_tokens, row.cache.get_seq_length())
    return found


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("method", REPLAYABLE)
def test_tokens_and_bytes_are_the_loops(model, uncaptured, method, granularity):
    attachment = attach(model, method, max_capacity_prompt=48, kv_cache_granularity=granularity)
    try:
        expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        for batch in (1, 3):
            for keep in (True, False):
                assert outcome(uncaptured(model, batch, keep_caches=keep).run(requests([attachment.plan]))) == expected
    finally:
        detach(model)


def test_stops_and_tokens_that_cannot_stop(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        free = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        tokens = [row[0] for row in free.values()]
        stops = sorted({row[3] for row in tokens})[:2]  # met in the middle of some rows
        for min_new in (0, 6):
            asked = dict(stops=stops, min_new=min_new)
            expected = outcome(Decoder(model, 1).run(requests([attachment.plan], **asked)))
            assert expected != free
            for batch in (1, 4):
                assert outcome(uncaptured(model, batch).run(requests([attachment.plan], **asked))) == expected
    finally:
        detach(model)


def test_one_prompt_several_methods_and_budgets(model, uncaptured):
    plans = [
        make_plan(m, max_capacity_prompt=b, kv_cache_granularity="query_head")
        for m in ("fullkv", "snapkv", "adakv")
        for b in (32, 64)
    ]
    attach(model, "fullkv")
    try:
        expected = outcome(Decoder(model, 1).run(requests(plans, LENGTHS[:3])))
        assert outcome(uncaptured(model, 4).run(requests(plans, LENGTHS[:3]))) == expected
    finally:
        detach(model)


def test_methods_that_change_stores_while_decoding_stay_in_the_loop(model, uncaptured):
    plans = [
        make_plan("snapkv", max_capacity_prompt=40),
        make_plan("h2o", max_capacity_prompt=40, decode_evict="on", preset="paper"),
        make_plan("oracle", max_capacity_prompt=40),
    ]
    attachment = attach(model, "fullkv")
    try:
        expected = outcome(Decoder(model, 1).run(requests(plans, LENGTHS[:2])))
        decoder = uncaptured(model, 3)
        assert outcome(decoder.run(requests(plans, LENGTHS[:2]))) == expected
        reasons = [_of_method(attachment, plan) for plan in plans]
        assert reasons[0] is None and "H2O moves" in reasons[1] and "Oracle chooses" in reasons[2]
    finally:
        detach(model)


def test_the_pool_is_kept_between_runs_and_grows_when_it_must(model, uncaptured):
    attachment = attach(model, "fullkv")
    try:
        list(uncaptured(model, 2).run(requests([attachment.plan], (40, 50))))
        engine = attachment.graph_engines[2]
        first = engine._pool
        list(uncaptured(model, 2).run(requests([attachment.plan], (45, 30))))
        assert engine._pool is first
        rows = outcome(uncaptured(model, 2).run(requests([attachment.plan], (30, 45, 140, 38))))
        assert engine._pool is not first and all(b >= a for a, b in zip(first.sizes, engine._pool.sizes, strict=True))
        assert rows == outcome(Decoder(model, 1).run(requests([attachment.plan], (30, 45, 140, 38))))
    finally:
        detach(model)


def test_an_abandoned_run_leaves_nothing_behind(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        abandoned = uncaptured(model, 3).run(requests([attachment.plan]))
        next(abandoned)
        abandoned.close()
        assert outcome(uncaptured(model, 3).run(requests([attachment.plan]))) == expected
    finally:
        detach(model)


def test_rows_without_their_caches_are_views_of_the_pool(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        for keep in (True, False):
            decoder = uncaptured(model, 1, keep_caches=keep)
            for _, row, _ in decoder.run(requests([attachment.plan], (60,))):
                pool = decoder._graph._pool
                shared = row.cache.kv_layers[0].store.buffers[0].data_ptr() == pool.keys[0].data_ptr()
                assert shared is not keep
    finally:
        detach(model)


def test_every_registered_method_is_replayed_or_says_why_not(model):
    attachment = attach(model, "fullkv")
    try:
        for name in METHODS:
            if name == "HeadKV":  # needs a score file of the model
                continue
            reason = _of_method(attachment, make_plan(name, max_capacity_prompt=32))
            assert reason is None or name in reason
    finally:
        detach(model)


def test_verifying_a_row_finds_the_first_token_that_differs(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        [(request, row, _)] = list(uncaptured(model, 1).run(requests([attachment.plan], (60,))))
        assert first_difference(model, request, row) == (None, 0.0)
        assert f"all {len(row.tokens)} tokens" in check_against_loop(model, request, row)
        row.tokens[4] = (row.tokens[4] + 1) % 90
        step, gap = first_difference(model, request, row)
        assert step == 4 and gap > 0
        if gap >= 1e-3:
            with pytest.raises(DecodeMismatch, match="token 4 is not the loop's"):
                check_against_loop(model, request, row)
    finally:
        detach(model)


def test_spans_are_taken_first_fit_and_joined_when_freed():
    arena = Arena(100)
    a, b, c = arena.take(40), arena.take(30), arena.take(30)
    assert (a, b, c) == (0, 40, 70) and arena.take(1) is None
    arena.give(a, 40)
    assert arena.take(50) is None
    arena.give(b, 30)
    assert arena.take(65) == 0 and arena.take(6) is None and arena.take(5) == 65


def test_a_prompt_with_a_place_fills_it_without_a_copy(model, uncaptured):
    """From the second prompt on the pool is there: what the prompt keeps lies in it from the start."""
    for method in ("snapkv", "adakv", "fullkv"):
        attachment = attach(model, method, max_capacity_prompt=48)
        try:
            decoder = uncaptured(model, 1, keep_caches=False)
            rows = decoder.run(requests([attachment.plan], (60, 60)))
            next(rows)
            pool = decoder._graph._pool
            copied = []
            take_over = pool._take_over

            def watched(store, i, row, room, pool=pool, copied=copied, take_over=take_over):
                copied.append(store.buffers[0].data_ptr() != pool.span(row, i)[0].data_ptr())
                return take_over(store, i, row, room)

            pool._take_over = watched
            next(rows)
            assert copied == [False] * 3
        finally:
            detach(model)


def test_a_prompt_that_fails_or_ends_at_once_gives_its_place_back(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        list(uncaptured(model, 2).run(requests([attachment.plan])))
        first = requests([attachment.plan], (60,))[0]
        first.max_new = 1
        rows = list(uncaptured(model, 2).run([first]))
        engine = attachment.graph_engines[2]
        assert len(rows[0][1].tokens) == 1 and not engine._reserved and not engine._pool._spans
        assert rows[0][1].cache.bytes().used > 0
    finally:
        detach(model)


def test_rows_are_lost_with_their_error_when_a_larger_pool_cannot_be_had(model, uncaptured, monkeypatch):
    attachment = attach(model, "fullkv")
    try:
        decoder = uncaptured(model, 2)
        made = []

        def pool(*args):
            made.append(args)
            if len(made) in (2, 3):  # the roomy one, and the one that only just holds the rows
                raise torch.OutOfMemoryError("no memory")
            return DecodePool(*args)

        monkeypatch.setattr("kvfactory.graph_engine.DecodePool", pool)
        work = [
            Request(random_prompt(n, seed=n), new, 0, [], [attachment.plan], str(n))
            for n, new in ((30, 20), (32, 3), (120, 5), (31, 4))
        ]
        rows = {request.example_id: row for request, row, _ in decoder.run(work)}
        assert sorted(rows) == ["120", "30", "31", "32"]
        assert all(isinstance(rows[name], torch.OutOfMemoryError) for name in ("30", "120"))
        assert len(rows["32"].tokens) == 3 and len(rows["31"].tokens) == 4
    finally:
        detach(model)
