"""Each benchmark once on the CPU with tiny shapes, and its random models."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import save_checkpoint

from benchmarks import bench_correctness, bench_kernels, bench_longbench, bench_methods, measure, peers
from benchmarks.models import random_ids, random_model, write_head_scores
from benchmarks.peers import measure_kvpress, measure_transformers
from kvfactory import decoder
from kvfactory.graph_engine import GraphEngine
from kvfactory.loop_engine import LoopEngine
from kvfactory.monkeypatch import get_attachment
from kvfactory.ops.head_scores import load_head_scores
from kvfactory.plan import make_plan

TINY = ["--model", "tiny", "--device", "cpu", "--dtype", "float32"]


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_kvpress_runs_under_its_press_or_says_which_transformers_it_needs(monkeypatch):
    """A stand-in with kvpress's calls: a press is made with its settings and surrounds the prompt pass alone."""
    calls = []

    class Press:
        def __init__(self, **settings):
            calls.append(settings)

        @contextmanager
        def __call__(self, model):
            calls.append("enter")
            yield
            calls.append("leave")

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(KnormPress=Press))
    model = random_model("tiny", "cpu", torch.float32, layers=2)
    ids = random_ids(model, 40, 0)
    monkeypatch.setattr(peers, "cache_keyword", lambda model: "past_key_values")
    facts = measure_kvpress(model, ids, "L2Norm", 10, 9, 1, 0.0)
    assert calls == [{"compression_ratio": 0.75}, *["enter", "leave"] * 2]  # a warm-up and one pass
    assert facts["decode_ms"] > 0 and facts["kept_mean"] == 40  # the stand-in drops nothing
    monkeypatch.setattr(peers, "cache_keyword", lambda model: "cache")
    with pytest.raises(ValueError, match="transformers calls cache from 5.24 on: install an older one"):
        measure_kvpress(model, ids, "L2Norm", 10, 9, 1, 0.0)


def test_random_model_spreads_its_queries():
    plain = random_model("tiny", "cpu", torch.float32, layers=2, seed=3)
    spread = random_model("tiny", "cpu", torch.float32, layers=2, seed=3, query_spread=30.0)
    pairs = zip(plain.model.layers, spread.model.layers, strict=True)
    ratios = [b.self_attn.q_proj.weight / a.self_attn.q_proj.weight for a, b in pairs]
    assert len(ratios) == 2
    for ratio in ratios:
        per_head = ratio.view(6, -1)
        assert torch.allclose(per_head, per_head[:, :1].expand_as(per_head), rtol=1e-5)
        want = torch.logspace(0, 1, 6, base=30)
        assert torch.allclose(per_head[:, 0].sort().values, want, rtol=1e-5)
    assert torch.equal(plain.lm_head.weight, spread.lm_head.weight)
    assert not any(p.is_meta for p in spread.parameters()) and not spread.model.rotary_emb.inv_freq.is_meta
    with pytest.raises(ValueError, match="--devices 2"):
        random_model("tiny", "cpu", torch.float32, devices=2)


def test_head_scores_are_read_by_the_product_and_uneven(tmp_path):
    scores = load_head_scores(write_head_scores(tmp_path / "s.json", 3, 6)).values
    assert scores.shape == (3, 6) and scores.max() > 5 * scores.min()


def test_methods(tmp_path, capsys):
    out = tmp_path / "m.jsonl"
    argv = [*TINY, "--methods", "fullkv,headkv", "--prompts", "150", "--budgets", "40", "--rows", "1,3@150"]
    argv += ["--new_tokens", "8", "--repeats", "1", "--peers", "transformers", "--output", str(out)]
    assert bench_methods.run(argv) == 0
    cases = [line for line in _lines(out) if line["kind"] == "case"]
    assert [(c["system"], c["method"], c["rows"]) for c in cases] == [
        ("kvfactory", "FullKV", 1),
        ("kvfactory", "FullKV", 3),
        ("kvfactory", "HeadKV", 1),
        ("kvfactory", "HeadKV", 3),
        ("transformers", "FullKV", 1),
    ]
    assert all(c["decode_ms"] > 0 for c in cases)
    assert cases[0]["bytes"] == cases[0]["bytes_full"] and cases[2]["kept_min"] < cases[2]["kept_max"] < 150
    assert "not measured" in capsys.readouterr().out


def test_a_case_that_fails_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_methods, "measure_prefill", lambda model, ids, plan, *a: 1 / (plan.method != "FullKV"))
    out = tmp_path / "m.jsonl"
    argv = [*TINY, "--methods", "fullkv,snapkv", "--prompts", "60", "--budgets", "20", "--output", str(out)]
    assert bench_methods.run(argv) == 1
    errors = [line.get("error", "") for line in _lines(out) if line["kind"] == "case"]
    assert len(errors) == 2 and "ZeroDivisionError" in errors[0] and "ZeroDivisionError" not in errors[1]


@pytest.mark.parametrize("method", ["snapkv", "adakv"])
def test_rows_enter_a_pool_one_by_one_and_decode_together(method, monkeypatch):
    model = random_model("tiny", "cpu", torch.float32, query_spread=3.0)
    plan = make_plan(method, max_capacity_prompt=40, kv_cache_granularity="kv_head")
    monkeypatch.setattr(measure, "graph_obstacle", lambda *a: None)
    monkeypatch.setattr(decoder, "graph_obstacle", lambda *a: None)
    entered = []
    enter = GraphEngine.enter
    monkeypatch.setattr(GraphEngine, "enter", lambda self, rows: (entered.append(len(rows)), enter(self, rows)))
    monkeypatch.setattr(LoopEngine, "enter", lambda self, rows: None if not rows else pytest.fail("left the graph"))
    with measure.attached(model, plan, "sdpa"):
        get_attachment(model).graph_engines[5] = GraphEngine(model, 5, capture=False)
        facts = measure.measure_decode(model, random_ids(model, 120), plan, 8, 5, "graph", None)
    assert facts["decode_ms"] > 0 and entered == [1] * 5
    assert get_attachment(model) is None


def test_no_graph_is_an_error_not_a_loop():
    model = random_model("tiny", "cpu", torch.float32)
    plan = make_plan("fullkv")
    with measure.attached(model, plan, "sdpa"), pytest.raises(ValueError, match="no graph: CUDA graphs need"):
        measure.measure_decode(model, random_ids(model, 20), plan, 8, 1, "graph", None)


def test_stock_model_beside_ours_generates_all_tokens():
    model = random_model("tiny", "cpu", torch.float32)
    facts = measure_transformers(model, random_ids(model, 50), 9, 1, 0.0)
    assert facts["decode_ms"] > 0 and facts["prefill_s"] > 0


def test_longbench(tmp_path, capsys):
    out = tmp_path / "l.jsonl"
    argv = [
        *TINY,
        "--methods",
        "snapkv",
        "--budgets",
        "24",
        "--batch_sizes",
        "1,2",
        "--prompt",
        "80",
        "--new_tokens",
        "3",
    ]
    argv += ["--examples", "2", "--sweep_batch", "2", "--sweep_methods", "snapkv,l2norm", "--sweep_budgets", "16,24"]
    assert bench_longbench.run([*argv, "--output", str(out)]) == 0
    one, two, sweep = _lines(out)[1:]
    assert (one["rows"], one["new_tokens"]) == (2, 6) and (two["rows"], two["new_tokens"]) == (4, 12)
    assert two["seconds_per_example"] == pytest.approx(two["seconds"] / 4, abs=1e-4)
    assert sweep["plans"] == 4 and len(sweep["apart_each_s"]) == 4
    assert sweep["share"] == pytest.approx(sweep["together_s"] / sweep["apart_s"], rel=1e-3)


def test_prompts_are_alike_or_drawn_between_half_and_all_of_the_longest():
    assert bench_longbench.prompt_lengths("fixed", 301, 3, 0) == [301] * 3
    drawn = bench_longbench.prompt_lengths("varied", 7, 200, 0)
    assert set(drawn) == {4, 5, 6, 7}
    assert (
        drawn
        == bench_longbench.prompt_lengths("varied", 7, 200, 0)
        != bench_longbench.prompt_lengths("varied", 7, 200, 1)
    )


def test_output_lengths_follow_the_benchmark():
    lengths = bench_longbench.output_lengths("longbench", 7)
    assert [next(lengths) for _ in range(17)] == [
        128,
        128,
        64,
        32,
        32,
        32,
        512,
        512,
        512,
        64,
        32,
        128,
        32,
        32,
        64,
        64,
        128,
    ]


def test_kernels(tmp_path, capsys):
    out = tmp_path / "k.jsonl"
    argv = ["--device", "cpu", "--dtype", "float32", "--heads", "4", "--kv_heads", "2", "--head_dim", "16"]
    argv += ["--lengths", "33", "--prompts", "40", "--rows", "2", "--windows", "8", "--kept", "7,41"]
    argv += ["--output", str(out)]
    assert bench_kernels.run(argv) == 0
    lines = _lines(out)[1:]
    kernels = {"copy", "append_and_attend", "gather_kept", "window_scores", "column_sums"}
    assert {line["kernel"] for line in lines} >= kernels
    assert all(line["us"] > 0 for line in lines)


def test_correctness(tmp_path, capsys):
    out = tmp_path / "c.jsonl"
    argv = ["--device", "cpu", "--methods", "adakv", "--float32_models", "tiny", "--half_model", "tiny"]
    argv += ["--half_prompt", "80", "--half_examples", "2", "--new_tokens", "3", "--checks", "tokens,half"]
    assert bench_correctness.run([*argv, "--output", str(out)]) == 0
    checks = _lines(out)[1:]
    assert {line["check"] for line in checks} == {"tokens", "half"} and all(line["passed"] for line in checks)


def test_kept_sets_are_compared_position_by_position(tmp_path, monkeypatch):
    scores = write_head_scores(tmp_path / "s.json", 2, 32)
    facts = bench_correctness.check_kept("HeadKV", "kv_head", torch.device("cpu"), scores, 0)
    assert facts["passed"] and facts["kept_min"] < facts["kept_max"]
    right, calls = bench_correctness.compress_prompt, []

    def second_drops_one(*args, **kwargs):
        kept = right(*args, **kwargs)
        calls.append(kept)
        if len(calls) == 2:
            kept.indices[0][3] = kept.indices[0][3][1:]
        return kept

    monkeypatch.setattr(bench_correctness, "compress_prompt", second_drops_one)
    facts = bench_correctness.check_kept("HeadKV", "kv_head", torch.device("cpu"), scores, 0)
    assert (facts["passed"], facts["positions_differing"], facts["heads_differing"]) == (False, 1, 1)


def test_a_wrong_token_fails_the_check(tmp_path, monkeypatch, capsys):
    right = bench_correctness.tokens_of

    def wrong(model, prompts, count, decode, batch):
        found = right(model, prompts, count, decode, batch)
        return [[*row[:-1], row[-1] ^ 1] for row in found] if decode == "hf" else found

    monkeypatch.setattr(bench_correctness, "tokens_of", wrong)
    argv = ["--device", "cpu", "--methods", "streamingllm", "--checks", "tokens", "--float32_models", "tiny"]
    assert bench_correctness.run([*argv, "--new_tokens", "3"]) == 1
    assert "1 checks, 1 failed" in capsys.readouterr().out


def _script():
    path = Path(__file__).parents[2] / "scripts" / "benchmark_latency_memory.py"
    spec = importlib.util.spec_from_file_location("benchmark_latency_memory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_latency_script_on_a_checkpoint(tmp_path, capsys):
    folder = save_checkpoint(tmp_path)
    argv = ["--model_path", str(folder), "--method", "snapkv", "--max_capacity_prompts", "24", "--device", "cpu"]
    argv += ["--kv_cache_granularity", "kv_head", "--prompt_len", "60", "--max_new_tokens", "4", "--batch_size", "2"]
    script = _script()
    assert script.run([*argv, "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "2 x 60 tokens" in shown and "of FullKV's cache                      0.4000" in shown
    with pytest.raises(ValueError, match="--max_new_tokens 1 is not at least 2"):
        script.parse(["--model_path", "x", "--max_new_tokens", "1"])
