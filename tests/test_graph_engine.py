"""The step that is captured on CUDA, run uncaptured on the CPU: the loop's tokens, rows that come and go, one pool."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from replaying import LENGTHS, outcome, request, requests
from tiny import shared_model, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from kvfactory import attach, detach
from kvfactory.capability import FAMILIES
from kvfactory.decoder import Decoder
from kvfactory.graph_engine import ALIVE
from kvfactory.graph_support import _of_method
from kvfactory.plan import make_plan

REPLAYABLE = ["fullkv", "snapkv", "streamingllm", "h2o", "l2norm", "pyramidkv", "adakv", "random"]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


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
        for min_new in (0, 2, 3, 6):
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


def test_a_looped_row_that_finishes_makes_room_for_a_replayed_one(model, uncaptured):
    """The replayed rows beside it have no step under way then, behind which the new row could not enter."""
    replayed = make_plan("snapkv", max_capacity_prompt=40)
    looped = make_plan("h2o", max_capacity_prompt=40, decode_evict="on", preset="paper")
    attach(model, "fullkv")
    work = [request(replayed, 60, 20), request(looped, 61, 4), request(replayed, 62, 5), request(looped, 63, 5)]
    try:
        assert outcome(uncaptured(model, 2).run(work)) == outcome(Decoder(model, 1).run(work))
    finally:
        detach(model)


def test_steps_run_ahead_and_count_rows_that_live(model, uncaptured, monkeypatch):
    """Two steps are under way at most; a row that stops has appended what its tokens say, though a step ran ahead."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        free = next(iter(outcome(Decoder(model, 1).run([request(attachment.plan, 60, 9)])).values()))[0]
        stop = free[3]
        assert stop not in free[:3]
        work = [request(attachment.plan, 60, 9, [stop]), request(attachment.plan, 61, 9, [-1])]
        for batch in (1, 2):
            decoder = uncaptured(model, batch)
            launched, launch = [], decoder._graph._launch

            def watched(launched=launched, launch=launch, engine=decoder._graph):
                launched.append(engine._pending is not None)
                return launch()

            monkeypatch.setattr(decoder._graph, "_launch", watched)
            rows = {asked.example_id: row for asked, row, _ in decoder.run(work)}
            assert [len(rows[name].tokens) for name in ("60", "61")] == [4, 9]
            assert rows["60"].cache.get_seq_length() == 63 and rows["61"].cache.get_seq_length() == 69
            # Alone: 3 steps and one that ran ahead in vain, then 8. Together: 3 shared, 5 for the row that goes on.
            assert decoder.counters.decoded_rows == 11
            assert decoder.counters.decode_forwards == len(launched) == (12 if batch == 1 else 8)
            assert sum(launched) == (10 if batch == 1 else 6)
            assert rows["61"].rows_in_flight == (1 if batch == 1 else (3 * 2 + 5) / 8)
            assert (rows["61"].timing.decode_s is None) == (batch == 2)
    finally:
        detach(model)


def test_near_ties_of_shared_steps_are_counted_per_row(model, uncaptured, monkeypatch):
    """The two best logits of the first row are always close, also where the best is a stop that it may not choose."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        for batch in (1, 3):
            decoder = uncaptured(model, batch)

            def flat(model, ids, cache, positions):
                logits = torch.zeros(ids.shape[0], model.config.vocab_size)
                logits[:, 5], logits[:, 6], logits[:, 7], logits[:, 8] = 2.0, 1.0, 1.0 - 0.5e-3, 0.5
                logits[1:, 5] = 3.0
                return logits

            monkeypatch.setattr("kvfactory.graph_engine.forward", flat)
            work = [request(attachment.plan, 60, 6, [5], 6, name=str(i)) for i in range(2)]
            work += [request(attachment.plan, 60, 6, name="2")]
            rows = {asked.example_id: row for asked, row, _ in decoder.run(work)}
            ties = [rows[str(i)].near_ties for i in range(3)]
            assert ties == ([0, 0, 0] if batch == 1 else [5, 5, 0])
            assert rows["0"].tokens[1:] == [6] * 5 and rows["2"].tokens[1:] == [5] * 5
    finally:
        detach(model)


def test_stops_that_the_model_cannot_choose(model, uncaptured):
    """A checkpoint may name -1, or an id beyond its logits; neither blocks another token nor reads out of bounds."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        free = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        for min_new in (0, 5):
            asked = dict(stops=[-1, 10**6], min_new=min_new)
            assert outcome(Decoder(model, 1).run(requests([attachment.plan], **asked))) == free
            assert outcome(uncaptured(model, 3).run(requests([attachment.plan], **asked))) == free
    finally:
        detach(model)


@pytest.mark.parametrize("second", [0, 96])
def test_only_stops_are_blocked(model, uncaptured, monkeypatch, second):
    """Also in a pool that has room for more of them than the row has, and beside ids that no logit has."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)

    def flat(model, ids, cache, positions):
        logits = torch.zeros(ids.shape[0], model.config.vocab_size)
        logits[:, 5], logits[:, second] = 3.0, 2.0
        return logits

    try:
        for module in ("graph_engine", "loop_engine"):
            monkeypatch.setattr(f"kvfactory.{module}.forward", flat)
        work = [request(attachment.plan, n, 6, stops, 4) for n, stops in ((60, [5]), (61, [5, -1, 10**6]))]
        work.append(request(attachment.plan, 62, 6, [7, 8, 9]))
        for decoder in (uncaptured, Decoder):
            rows = {asked.example_id: row.tokens for asked, row, _ in decoder(model, 3).run(work)}
            assert rows["60"][1:] == rows["61"][1:] == [second] * 3 + [5] and rows["62"][1:] == [5] * 5
    finally:
        detach(model)


def test_more_stops_than_the_pool_was_made_for(model, uncaptured):
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        tokens = [row[0] for row in outcome(Decoder(model, 1).run(requests([attachment.plan]))).values()]
        stops = sorted({row[4] for row in tokens})
        assert len(stops) > 2
        few, many = ([request(attachment.plan, n, 9, s) for n in (60, 61)] for s in ([], stops))
        engine_of = lambda: attachment.graph_engines[2]  # noqa: E731
        list(uncaptured(model, 2).run(few))
        first = engine_of()._pool
        assert outcome(uncaptured(model, 2).run(many)) == outcome(Decoder(model, 1).run(many))
        assert engine_of()._pool is not first
        # A larger pool, for a row without stops at kv heads, still takes the others.
        larger, before = request(make_plan("fullkv"), 700, 9), engine_of()._pool
        list(uncaptured(model, 2).run([larger]))
        last = engine_of()._pool
        assert last is not before and last.sizes > before.sizes
        assert outcome(uncaptured(model, 2).run([*many, larger])) == outcome(Decoder(model, 1).run([*many, larger]))
        assert engine_of()._pool is last
    finally:
        detach(model)


def test_places_without_a_row_hold_nothing(model, uncaptured):
    """Dead places read nothing, and write nothing where another row may be; spans and reservations are given back."""
    attachment = attach(model, "adakv", max_capacity_prompt=48)
    try:
        free = outcome(Decoder(model, 1).run(requests([attachment.plan], new=6)))
        stops = {row[0][2] for row in free.values()}
        decoder = uncaptured(model, 3)
        for _ in decoder.run(requests([attachment.plan], new=6, stops=sorted(stops)[:3])):
            engine, pool = decoder._graph, decoder._graph._pool
            lengths = pool.lengths.view(3, 3, -1)  # layers, places, heads
            for place in range(3):
                assert bool(lengths[:, place].any()) == (place in engine._live)
                assert bool(engine._state[ALIVE, place]) == (place in engine._live)
        assert not pool._spans and not pool._placed and not engine._reserved
        assert all(arena._free == [(0, arena.size)] for arena in pool._arenas)
    finally:
        detach(model)


class NoHostWait(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "repeat_interleave.Tensor", "equal")
        assert not any(part in name for part in waits), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mixtral"])
def test_a_step_asks_the_device_for_nothing(family, uncaptured, monkeypatch):
    """With the decode kernel put aside, whose definition in torch reads lengths; Mixtral is not replayed."""
    model = shared_model(family)
    attachment = attach(model, "snapkv", max_capacity_prompt=24)
    try:
        decoder = uncaptured(model, 2)
        rows = decoder.run([request(attachment.plan, 60, 9), request(attachment.plan, 61, 4)])
        next(rows)
        engine, calls = decoder._graph, []
        kernels = namedtuple("Kernels", "append_and_attend")(lambda q, *a, **k: calls.append(1) or q.clone())
        for layer in engine._cache.layers:
            layer._kernels = kernels
        monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("tolist"))
        with NoHostWait():
            engine._body()
        monkeypatch.undo()
        assert len(calls) == len(engine._cache.layers)
    finally:
        detach(model)
