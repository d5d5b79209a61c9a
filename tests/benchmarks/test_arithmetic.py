"""What the benchmarks compute from their measurements, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import arguments, bench_correctness, bench_kernels, bench_longbench, bench_methods
from benchmarks.targets import judge
from benchmarks.timing import Log, repeat_within, steady_ms, table


def test_steady_time_is_the_middle_of_full_steps():
    # Steps of 9, 1, 2, 3, 4, 9 seconds with two rows, then one with a single row.
    ends = [0, 9, 10, 12, 15, 19, 28, 29]
    marks = [(float(end), 2) for end in ends[:-1]] + [(29.0, 1)]
    assert steady_ms(marks, 2) == pytest.approx(2500)  # of 6 steps the middle four: 1, 2, 3, 4
    assert steady_ms(marks, 3) is None


def test_repeats_stop_at_the_limit_but_one_is_always_timed():
    ticks = iter(range(0, 100, 10))
    calls = []

    def call():
        calls.append(1)
        return float(len(calls))

    assert repeat_within(call, 5, 25.0, clock=lambda: next(ticks)) == [2.0, 3.0, 4.0]
    assert repeat_within(call, 5, 0.0, clock=lambda: next(ticks)) == [6.0]


def _case(method, prompt=8192, rows=1, **figures):
    base = {"kind": "case", "system": "kvfactory", "budget": None if method == "FullKV" else 2048}
    return (
        base | {"method": method, "prompt": prompt, "rows": rows, "granularity": "kv_head", "decode": "graph"} | figures
    )


def _verdicts(records):
    return {(o.target, o.method): o.verdict for o in judge(records)}


def test_targets_are_judged_by_their_own_case():
    records = [
        _case("FullKV", prefill_s=1.0, decode_ms=20.0, peak_extra_gib=2.0),
        _case("SnapKV", prefill_s=1.031, decode_ms=7.0, peak_extra_gib=1.16),
        _case("AdaKV", prefill_s=1.029, decode_ms=8.1),
        _case("HeadKV", decode_ms=7.6) | {"granularity": "query_head"},
        _case("H2O", prefill_s=1.5, decode_ms=7.0) | {"decode": "loop"},
        _case("SnapKV", 32768, 16, decode_ms=10.5),
        _case("FullKV", 32768, 16, decode_ms=21.1),
    ]
    verdicts = _verdicts(records)
    assert verdicts["decode ms/token, 8192 -> 2048", "SnapKV"] == "met"
    assert verdicts["decode ms/token, 8192 -> 2048", "AdaKV"] == "missed"
    assert verdicts["decode ms/token, 8192 -> 2048", "HeadKV"] == "not measured"  # another granularity
    assert verdicts["decode ms/token, 8192 -> 2048", "H2O"] == "not measured"  # not replayed
    assert verdicts["decode / SnapKV, 8192 -> 2048", "AdaKV"] == "missed"  # 1.157
    assert verdicts["prefill / our FullKV, 8192", "SnapKV"] == "missed"
    assert verdicts["prefill / our FullKV, 8192", "AdaKV"] == "met"
    assert verdicts["prefill / our FullKV, 8192", "H2O"] == "met"
    assert verdicts["prefill / transformers' FullKV, 8192", "SnapKV"] == "not measured"
    assert verdicts["16 rows: step ms, 32768 -> 2048", "SnapKV"] == "missed"
    assert verdicts["16 rows: step / our FullKV, 32768 -> 2048", "SnapKV"] == "met"
    assert verdicts["prefill peak GiB at most kvpress's, 8192", "SnapKV"] == "met"


def test_a_failed_case_and_another_budget_judge_nothing():
    records = [_case("SnapKV", decode_ms=1.0, error="out of memory"), _case("L2Norm", decode_ms=1.0) | {"budget": 128}]
    assert set(_verdicts(records).values()) == {"not measured"}


def test_kvpress_of_the_same_run_is_the_limit():
    records = [_case("SnapKV", peak_extra_gib=1.0), _case("SnapKV", peak_extra_gib=0.9) | {"system": "kvpress"}]
    assert _verdicts(records)["prefill peak GiB at most kvpress's, 8192", "SnapKV"] == "missed"


def test_log_survives_a_failing_case(tmp_path, capsys):
    path = tmp_path / "new" / "out.jsonl"
    log = Log(str(path), torch.device("cpu"))
    assert not log.case({"kind": "case", "method": "a"}, lambda: 1 / 0)
    assert log.case({"kind": "case", "method": "b"}, lambda: {"us": 2.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", "case", "case"]
    assert lines[1]["error"].startswith("ZeroDivisionError") and lines[2]["us"] == 2.0
    assert log.failed == 1 and "ZeroDivisionError" in capsys.readouterr().err


def test_cases_leave_out_axes_without_effect_and_budgets_that_drop_nothing():
    got = list(bench_methods.cases(["FullKV", "L2Norm", "SnapKV"], [64, 512], ["kv_head", "query_head"], 300))
    assert [tuple(case) for case in got] == [
        ("FullKV", None, None),
        ("L2Norm", 64, None),
        ("SnapKV", 64, "kv_head"),
        ("SnapKV", 64, "query_head"),
    ]


def test_first_difference():
    assert bench_correctness.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert bench_correctness.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert bench_correctness.first_difference([1, 2], [1, 2, 3]) == 2
    found = bench_correctness.differences([[1, 2], [3, 4]], [[1, 2], [3, 9]], [[0.1, 0.2], [0.3, 0.4]])
    assert found == [{"example": 1, "step": 1, "gap": 0.4}]


def test_row_counts_and_table():
    assert arguments.row_counts("1,16@32768") == [(1, None), (16, 32768)]
    assert table(["a", "b"], [[None, 1.23456]]).splitlines()[-1] == "|  | 1.235 |"


@pytest.mark.parametrize(
    ("parse", "argv", "part"),
    [
        (bench_methods.parse, ["--prompts", "8k"], "--prompts 8k"),
        (bench_methods.parse, ["--rows", "0"], "--rows 0"),
        (bench_methods.parse, ["--granularity", "head"], "--granularity head"),
        (bench_methods.parse, ["--peers", "vllm"], "--peers vllm"),
        (bench_methods.parse, ["--new_tokens", "4"], "--new_tokens 4"),
        (bench_methods.parse, ["--methods", "snapvk"], "snapvk"),
        (bench_longbench.parse, ["--examples", "0"], "--examples 0"),
        (bench_longbench.parse, ["--budgets", "²"], "--budgets ² is not a list"),
        (bench_kernels.parse, ["--kernels", "sort"], "--kernels sort"),
        (bench_kernels.parse, ["--heads", "9", "--kv_heads", "2"], "--heads 9"),
        (bench_correctness.parse, ["--checks", "all"], "--checks all"),
    ],
)
def test_mistakes_are_one_sentence(parse, argv, part):
    with pytest.raises(ValueError, match=part) as error:
        parse(argv)
    assert "\n" not in str(error.value)
