"""--verify_decode: a row once more in the loop, as a function and in the runner."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from in_process import Runner
from replaying import request
from tiny import tiny_model
from tiny_checkpoint import save_checkpoint, write_dataset

from kvfactory import attach, detach, main
from kvfactory.graph_engine import GraphEngine
from kvfactory.plan import make_plan
from kvfactory.rows import Request
from kvfactory.run_settings import RunSettings
from kvfactory.verify_decode import DecodeMismatch, check_against_loop, first_difference


def finished(decoder, asked):
    [(_, row, _)] = decoder.run([asked])
    if isinstance(row, Exception):
        raise row
    return row


def test_the_first_token_that_differs(uncaptured):
    model = tiny_model("llama")
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    asked = request(attachment.plan, 60, 9)
    row = finished(uncaptured(model, 1), asked)
    assert first_difference(model, asked, row) == (None, 0.0)
    assert check_against_loop(model, asked, row) == "--verify_decode: SnapKV, 60: all 9 tokens are the loop's"
    for place in (0, 4, 8):
        other = dataclasses.replace(row, tokens=list(row.tokens))
        other.tokens[place] = (other.tokens[place] + 1) % 90
        step, gap = first_difference(model, asked, other)
        assert step == place and gap >= 1e-3
        with pytest.raises(DecodeMismatch, match=f"SnapKV, 60: token {place} is not the loop's, .* --decode loop"):
            check_against_loop(model, asked, other)
    detach(model)
    attachment = attach(model.to(torch.bfloat16), "snapkv", max_capacity_prompt=48)
    row = finished(uncaptured(model, 1), request(attachment.plan, 60, 9))
    row.tokens[3] = (row.tokens[3] + 1) % 90
    assert "token 3 is not the loop's, where the two largest logits" in check_against_loop(model, asked, row)


def test_a_near_tie_is_no_fault(uncaptured, monkeypatch):
    """The gap is between logits that may be chosen: a stop that may not be is none of the two."""
    model = tiny_model("llama")
    attachment = attach(model, "snapkv", max_capacity_prompt=48)
    asked = request(attachment.plan, 60, 4, [5], 4)
    row = finished(uncaptured(model, 1), asked)
    row.tokens = [7, 7, 7, 7]
    for gap, fault in ((0.5e-3, False), (2e-3, True)):

        def flat(model, ids, cache, positions=None, gap=gap):
            logits = torch.zeros(1, 97)
            logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 1.0, 1.0 - gap
            return logits

        monkeypatch.setattr("kvfactory.verify_decode.forward", flat)
        if fault:
            with pytest.raises(DecodeMismatch):
                check_against_loop(model, asked, row)
        else:
            assert "token 0 is not the loop's" in check_against_loop(model, asked, row)


def test_the_loop_gets_what_the_row_got(uncaptured):
    """Draws of the example, the sampler, the template's tail, limits and stops: each of them changes the tokens."""
    model = tiny_model("llama")
    random, window = make_plan("nacl", max_capacity_prompt=24), make_plan("snapkv", max_capacity_prompt=16)
    attach(model, "fullkv")
    prompt = request(None, 90, 9).ids
    last = lambda p: torch.arange(p.numel(), dtype=p.dtype).view_as(p)  # noqa: E731
    cases = [
        Request(prompt, 9, 0, [], [random], "a"),
        Request(prompt, 9, 0, [], [random], "b"),
        Request(prompt, 9, 0, [], [random], "a", sampler=last),
        Request(prompt, 9, 0, [], [window], template_tail=0),
        Request(prompt, 9, 0, [], [window], template_tail=5),
    ]
    rows = [finished(uncaptured(model, 1), asked) for asked in cases]
    assert len({tuple(row.tokens) for row in rows}) == len(cases)
    for asked, row in zip(cases, rows, strict=True):
        assert first_difference(model, asked, row) == (None, 0.0)
    tokens = rows[0].tokens
    later = next(i for i in range(3, 9) if tokens[i] not in tokens[:i])
    for stop, expected in ((tokens[0], None), (tokens[later], tokens[: later + 1])):  # blocked, then chosen
        asked = dataclasses.replace(cases[0], stops=[stop], min_new=3)
        row = finished(uncaptured(model, 1), asked)
        assert row.tokens == expected or (expected is None and row.tokens != tokens)
        assert first_difference(model, asked, row) == (None, 0.0)
    detach(model)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "Tiny")


@pytest.fixture
def run(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    for dataset, count in (("hotpotqa", 3), ("trec", 2)):
        write_dataset(tmp_path / "data", dataset, count)
    return Runner(checkpoint, tmp_path / "data", tmp_path / "out")


@pytest.fixture
def graph_runs(monkeypatch, uncaptured):
    """Runs are planned for the graph, as on CUDA, and replayed without a capture."""
    from kvfactory import preparation

    def planned(*args, **kwargs):
        job = preparation.prepare(*args, **kwargs)
        return dataclasses.replace(job, runs=[dataclasses.replace(each, decode="graph") for each in job.runs])

    monkeypatch.setattr("kvfactory.main.prepare", planned)
    monkeypatch.setattr("in_process.prepare", planned)


def notes(record):
    return [note for note in record["notes"] if "--verify_decode" in note]


SNAPKV = ("--method", "snapkv", "--max_capacity_prompts", 32)


@pytest.mark.parametrize("batch", [1, 2])
def test_equal_tokens_leave_a_note(run, graph_runs, capsys, batch):
    assert run(*SNAPKV, "--verify_decode", "--eval_batch_size", batch) == 0
    [note] = notes(run.record())
    assert note.startswith("--verify_decode: SnapKV, hotpotqa/hotpotqa-") and note.endswith("tokens are the loop's")
    assert capsys.readouterr().err.count("--verify_decode") == 1


def test_only_graph_runs_are_verified_and_only_on_request(run, graph_runs, monkeypatch):
    monkeypatch.setattr("kvfactory.runner.check_against_loop", lambda *_: pytest.fail("verified"))
    assert run(*SNAPKV) == 0 and notes(run.record()) == []


def test_loop_runs_are_not_verified(run, monkeypatch):
    monkeypatch.setattr("kvfactory.runner.check_against_loop", lambda *_: pytest.fail("verified"))
    assert run(*SNAPKV, "--verify_decode") == 0 and notes(run.record()) == []


def test_every_graph_run_of_a_call_is_verified(run, graph_runs):
    assert run("--method", "snapkv,adakv", "--max_capacity_prompts", 32, "--verify_decode") == 0
    assert ["SnapKV" in notes(run.record(0))[0], "AdaKV" in notes(run.record(1))[0]] == [True, True]


def test_a_mismatch_ends_the_run_with_exit_code_1(run, graph_runs, monkeypatch, capsys):
    """The row is no result, and the record has no exit code."""
    body = GraphEngine._body

    def broken(self):
        body(self)
        self._report[0] = (self._report[0] + 1) % 90

    monkeypatch.setattr(GraphEngine, "_body", broken)
    argv = [str(part) for part in (*run.common, *SNAPKV, "--verify_decode")]
    from kvfactory.suites.longbench import LongBenchSettings as Settings

    assert issubclass(Settings, RunSettings) and main.run(Settings, argv) == 1
    printed = capsys.readouterr()
    assert "token 1 is not the loop's" in printed.err and "use --decode loop, and report this" in printed.err
    assert "Traceback" not in printed.err and printed.out == ""
    assert not list(run.save_dir.rglob("hotpotqa/*.json"))
    [file] = run.save_dir.rglob("meta/*.json")
    assert json.loads(file.read_text())["segments"][-1]["exit"] is None


def test_rows_and_record_equal_those_of_the_loop(run, checkpoint, tmp_path, graph_runs, monkeypatch):
    """Rows are measured on views of the pool, whose places later rows take."""
    timings = {"prefill_s", "decode_s", "rows_in_flight", "peak_mem_bytes", "near_ties"}
    for batch in (1, 2):
        argv = ("--method", "snapkv,adakv,fullkv", "--max_capacity_prompts", 32, "--eval_batch_size", batch)
        graph = Runner(checkpoint, tmp_path / "data", tmp_path / f"graph{batch}")
        loop = Runner(checkpoint, tmp_path / "data", tmp_path / f"loop{batch}")
        assert graph(*argv) == 0
        with monkeypatch.context() as patch:
            from kvfactory.preparation import prepare

            patch.setattr("in_process.prepare", prepare)
            assert loop(*argv) == 0
        for number in range(3):
            for dataset in ("hotpotqa", "trec"):
                rows, expected = (
                    [{k: v for k, v in row.items() if k not in timings} for row in one.rows(dataset, number)]
                    for one in (graph, loop)
                )
                assert rows == expected and all("error" not in row for row in rows)
