"""The captured step between runs: who has it, when it is kept and when it goes; `generate` with it."""

from __future__ import annotations

import pytest
import torch
from replaying import LENGTHS, outcome, request, requests
from tiny import tiny_model

from kvfactory import attach, detach, generate
from kvfactory.decoder import Decoder


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


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


@pytest.mark.parametrize("size", [2, 3])
def test_two_decoders_at_once(model, uncaptured, size):
    """generate inside a consumer of rows: each has an engine of its own."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        outer, seen = uncaptured(model, 2).run(requests([attachment.plan])), []
        for row in outer:
            seen.append(row)
            inner = uncaptured(model, size).run(requests([attachment.plan], LENGTHS[:3]))
            assert outcome(inner).items() <= expected.items()
        assert outcome(seen) == expected
    finally:
        detach(model)


def test_an_engine_is_left_behind_by_runs_that_end_well(model, uncaptured):
    """One at most: each has a pool of its own."""
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        abandoned = uncaptured(model, 3).run(requests([attachment.plan]))
        next(abandoned)
        abandoned.close()
        assert attachment.graph_engines == {}
        assert outcome(uncaptured(model, 3).run(requests([attachment.plan]))) == expected
        left = attachment.graph_engines[3]
        assert outcome(uncaptured(model, 3).run(requests([attachment.plan]))) == expected
        assert attachment.graph_engines == {3: left}
        for _ in uncaptured(model, 2).run(requests([attachment.plan])):
            assert attachment.graph_engines == {}
        assert list(attachment.graph_engines) == [2]
    finally:
        detach(model)


def test_weights_that_moved_drop_the_captured_step(uncaptured):
    model = tiny_model("llama")
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    list(uncaptured(model, 2).run(requests([attachment.plan])))
    pool = attachment.graph_engines[2]._pool
    for change in (lambda: model.double(), lambda: setattr(model.lm_head, "weight", clone(model.lm_head.weight))):
        change()
        expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
        assert outcome(uncaptured(model, 2).run(requests([attachment.plan]))) == expected
        assert attachment.graph_engines[2]._pool is not pool
        pool = attachment.graph_engines[2]._pool
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # in place, where the captured step reads it
    list(uncaptured(model, 2).run(requests([attachment.plan])))
    assert attachment.graph_engines[2]._pool is pool


def clone(weight):
    return torch.nn.Parameter(weight.detach().clone())


def test_a_pool_made_in_inference_mode_serves_outside_of_it(uncaptured):
    model = tiny_model("llama")
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    expected = outcome(Decoder(model, 1).run(requests([attachment.plan])))
    with torch.inference_mode():
        assert outcome(uncaptured(model, 3).run(requests([attachment.plan]))) == expected
    assert outcome(uncaptured(model, 3).run(requests([attachment.plan]))) == expected


def test_detaching_ends_a_run_with_a_clear_error(model, uncaptured):
    for decoder in (uncaptured, Decoder):
        attachment = attach(model, "snapkv", max_capacity_prompt=48)
        rows = decoder(model, 2).run(requests([attachment.plan]))
        next(rows)
        detach(model)
        with pytest.raises(ValueError, match="SnapKV was detached while rows were being generated"):
            list(rows)
        assert attachment.graph_engines == {}
        attachment = attach(model, "snapkv", max_capacity_prompt=48)
        for _ in decoder(model, 2).run(requests([attachment.plan], (60,))):
            detach(model)  # behind the last row
        assert attachment.graph_engines == {}


def test_generate_says_once_why_it_does_not_replay(model, capsys):
    attach(model, "snapkv", max_capacity_prompt=48)
    try:
        prompt = request(None, 60, 1).ids
        loop = generate(model, prompt, 5, decode="loop").sequences
        for _ in range(2):
            assert torch.equal(generate(model, prompt, 5, decode="graph").sequences, loop)
        note = "note: decoding in the loop instead of a graph: CUDA graphs need a CUDA device"
        assert capsys.readouterr().err.splitlines() == [note]
        generate(model, prompt, 5)
        assert capsys.readouterr().err == ""
    finally:
        detach(model)


def test_generate_replays_where_it_can(model, uncaptured, monkeypatch):
    monkeypatch.setattr("kvfactory.generation.graph_obstacle", lambda *_: None)
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    try:
        prompts = [asked.ids for asked in requests([attachment.plan])]
        loop = generate(model, prompts, 6, decode="loop", batch_size=1)
        graph = generate(model, prompts, 6, decode="graph")
        assert all(map(torch.equal, loop.sequences, graph.sequences)) and list(attachment.graph_engines) == [7]
        assert graph.cache.nbytes == loop.cache.nbytes and graph.cache.kept_tokens == loop.cache.kept_tokens
    finally:
        detach(model)


def test_a_failed_prompt_of_generate_frees_the_engine(model, uncaptured, monkeypatch):
    monkeypatch.setattr("kvfactory.generation.graph_obstacle", lambda *_: None)
    attachment = attach(model, "snapkv", max_capacity_prompt_ratio=0.3)
    try:
        with pytest.raises(ValueError, match="window"):
            generate(model, [asked.ids for asked in requests([attachment.plan], (60, 20))], 6, decode="graph")
        assert attachment.graph_engines == {}
    finally:
        detach(model)
