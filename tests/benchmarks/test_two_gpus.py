"""The benchmark of two GPUs, tried out on the CPU, and what it calls passed."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import bench_two_gpus
from benchmarks.bench_two_gpus import compare_equal, compare_files, compare_half, time_limit
from benchmarks.models import random_ids, random_model
from kvfactory.methods.snapkv import SnapKV
from kvfactory.plan import make_plan

TINY = ["--device", "cpu", "--large_model", "tiny", "--half_model", "tiny", "--prompt", "300", "--budget", "40"]
TINY += ["--new_tokens", "8"]


def cases(path):
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["kind"] == "case"]


def test_every_part_runs_and_bytes_add_up(tmp_path, capsys):
    out = tmp_path / "two.jsonl"
    assert bench_two_gpus.run([*TINY, "--methods", "adakv,fullkv", "--half_prompts", "1", "--output", str(out)]) == 0
    found = cases(out)
    assert [(c["part"], c["method"]) for c in found] == [
        (part, method) for part in bench_two_gpus.PARTS for method in ("AdaKV", "FullKV")
    ]
    large = {c["method"]: c for c in found if c["part"] == "large"}
    assert large["FullKV"]["bytes_by_device"] == {"cpu": 3 * 2 * 2 * 16 * 300 * 2}  # layers, k and v, heads, D, tokens
    least, most = large["AdaKV"]["bytes_declared"]
    assert least <= large["AdaKV"]["bytes"] <= most and large["AdaKV"]["decode_ms"] > 0
    assert "8 cases, 0 not passed" in capsys.readouterr().out


def test_bytes_that_are_not_declared_do_not_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SnapKV, "declared_bounds", lambda self, ctx: (1, 2))
    out = tmp_path / "two.jsonl"
    assert bench_two_gpus.run([*TINY, "--parts", "large", "--methods", "snapkv", "--output", str(out)]) == 1
    assert cases(out)[0]["passed"] is False


def test_other_weights_are_found_different():
    one, two = (random_model("tiny", "cpu", torch.float32, seed=seed) for seed in (0, 1))
    prompts, plan = [random_ids(one, 90)], make_plan("snapkv", max_capacity_prompt=40)
    assert not compare_equal(one, two, plan, prompts, 6)["passed"]
    found = compare_half(one, two, plan, prompts, 6)
    assert found["differing"] == 1 and found["tokens_after_a_difference"] == 6 - found["first_differences"][0]
    two.load_state_dict(one.state_dict())
    assert compare_equal(one, two, plan, prompts, 6) == {"passed": True, "examples": 1, "different": []}


def test_time_runs_out(tmp_path, capsys):
    with pytest.raises(TimeoutError, match="not done after"), time_limit(0.05):
        while True:
            time.sleep(0.01)
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # the alarm is off
    out = tmp_path / "two.jsonl"
    argv = [*TINY, "--parts", "equal", "--methods", "snapkv", "--seconds", "0", "--output", str(out)]
    assert bench_two_gpus.run(argv) == 1
    assert cases(out)[0]["error"].startswith("not begun")


def test_folders_are_compared_row_by_row(tmp_path):
    def write(name, *rows):
        file = tmp_path / name / "m_32" / "qasper" / "SnapKV.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / name / "m_32" / "meta").mkdir(exist_ok=True)
        (tmp_path / name / "m_32" / "meta" / "SnapKV.json").write_text(name)
        return tmp_path / name

    row = {"_id": "a", "pred": "x", "decode_s": 1.0, "bytes_end": 3}
    a = write("a", row, row | {"_id": "b"})
    same = compare_files(a, write("b", row | {"decode_s": 2.0}, row | {"_id": "b"}))
    assert same["passed"] and (same["rows"], same["differing"]) == (2, 0)
    other = compare_files(a, write("c", row | {"pred": "y"}, row | {"_id": "b", "bytes_end": 4}))
    assert not other["passed"] and (other["differing"], other["other_answers"]) == (2, 1)
    assert compare_files(a, write("d", row))["missing"] == 1
    assert not compare_files(tmp_path / "none", tmp_path / "none")["passed"]
    assert bench_two_gpus.run(["--compare", f"{a},{tmp_path / 'b'}"]) == 0


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--parts", "large,small"], "--parts small"),
        (["--compare", "a"], "--compare a is not two folders"),
        (["--device", "cpu", "--new_tokens", "4"], "--new_tokens 4"),
        ([], "needs two CUDA devices"),
    ],
)
def test_bad_flags(argv, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=told):
        bench_two_gpus.parse(argv)
