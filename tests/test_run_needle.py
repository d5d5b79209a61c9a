"""run_needle_in_haystack.py on a tiny random checkpoint: rows, heat maps, resuming, shards, needles, refusals."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from calls import refused_early, rows, typed
from killing import kill_inside_row
from tiny_checkpoint import save_checkpoint

import run_needle_in_haystack as runner
from kvfactory.methods import METHODS
from kvfactory.needle.needles import NEEDLES
from kvfactory.needle.scores import needle_scores
from kvfactory.reports.records import read_lines

ROOT = Path(__file__).resolve().parents[1]
ROW_FIELDS = (
    *("question", "answers", "pred", "needle", "context_length", "depth_percent", "dataset", "_id", "score", "scores"),
    *("prompt_tokens", "prompt_tokens_raw", "truncated", "question_seen", "new_tokens", "think_tokens", "finish"),
    *("prefill_s", "decode_s", "rows_in_flight", "near_ties", "peak_mem_bytes"),
    *("bytes_prompt", "bytes_end", "bytes_aux", "bytes_alloc", "bytes_full"),
    *("budget_means", "kept_tokens", "tokens_attended", "compressed"),
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "Tiny", layers=2)


@pytest.fixture(autouse=True)
def environment(request, monkeypatch, tmp_path):
    if "slow" not in request.keywords:
        monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def argv(model, tmp_path):
    """A call that works, as a dict of flag to value: a grid of 3 x 3 cells."""
    flags = {"method": "snapkv", "model_path": model, "save_dir": tmp_path / "out", "device": "cpu"}
    flags |= {"s_len": 700, "e_len": 1100, "step": 200, "depths": "0,50,100"}
    return flags | {"max_capacity_prompts": 32, "max_new_tokens": 4, "quiet": None}


def pictures(folder):
    """{file below folder: content} of the heat maps and their tables."""
    found = [path for path in sorted(folder.glob("*/needle/*")) if path.suffix in (".png", ".csv")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def table(path):
    with open(path, newline="") as file:
        return list(csv.reader(file))


def refused(capsys, arguments, monkeypatch, save_dir):
    return refused_early(capsys, runner.main, arguments, monkeypatch, save_dir)


# --- what is written


def test_rows_have_exactly_the_agreed_fields_and_files_their_places(argv, tmp_path, capsys):
    assert runner.main(typed(argv)) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "out" / "tiny_32"
    [path] = (folder / "needle").glob("*.json")
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(
        f"{path.stem}{end}" for end in (".json", ".png", ".csv")
    )
    assert (folder / "meta" / path.name).is_file()
    lines = [line.row for line in read_lines(path)[0]]
    assert [tuple(row) for row in lines] == [ROW_FIELDS] * 9
    grid = [(length, depth) for length in (700, 900, 1100) for depth in (0, 50, 100)]
    assert [(row["context_length"], row["depth_percent"]) for row in lines] == grid
    assert [row["_id"] for row in lines] == [f"len{length}_depth{depth}_{NEEDLES[0].name}" for length, depth in grid]
    for row in lines:
        assert row["context_length"] - 100 < row["prompt_tokens"] + 4 <= row["context_length"]
        assert row["scores"] == needle_scores(NEEDLES[0], row["pred"]) and row["score"] == row["scores"]["recall"]
        assert row["compressed"] and not row["truncated"] and row["dataset"] == "needle"
    mean = sum(row["score"] for row in lines) / 9
    assert f"heat map: {path.with_suffix('.png')} (mean recall {mean:.3f})" in out
    assert "score again: python scripts/scripts_needle/visualize.py" in out
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    assert table(path.with_suffix(".csv"))[0] == ["depth_percent", "700", "900", "1100"]


def test_the_heat_map_shows_the_rows_that_are_there_and_visualize_draws_the_same(argv, tmp_path, capsys):
    assert runner.main(typed(argv)) == 0
    [path] = (tmp_path / "out").glob("*/needle/*.json")
    lines = [line.row for line in read_lines(path)[0]]
    for row in lines:  # a random model answers nothing
        if row["context_length"] == 900:
            pred = NEEDLES[0].text if row["depth_percent"] else "canoe"
            scores = needle_scores(NEEDLES[0], pred)
            row |= {"pred": pred, "scores": scores, "score": scores["recall"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert runner.main(typed(argv)) == 0  # nothing left to do: the table and the picture again
    shown = table(path.with_suffix(".csv"))
    assert [line[2] for line in shown] == ["900", f"{1 / 11:.6g}", "1", "1"]
    drawn = pictures(tmp_path / "out")
    command = [sys.executable, ROOT / "scripts" / "scripts_needle" / "visualize.py", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = pictures(tmp_path / "out")
    assert {name: again[name] for name in again if name.endswith("csv")} == {
        name: drawn[name] for name in drawn if name.endswith("csv")
    }


def test_a_failed_cell_has_its_place_and_fail_fast_stops(argv, tmp_path, monkeypatch, capsys):
    cluster = METHODS.get("snapkv")
    real = cluster.compress

    def compress(layer, q, k, v, context):
        if "len900_depth50" in context.example_id:
            raise ValueError("broken")
        return real(layer, q, k, v, context)

    monkeypatch.setattr(cluster, "compress", compress)
    assert runner.main(typed(argv, "--fail_fast")) == 1
    [lines] = rows(tmp_path / "out").values()
    place = {
        "_id": f"len900_depth50_{NEEDLES[0].name}",
        "dataset": "needle",
        "context_length": 900,
        "depth_percent": 50,
    }
    assert len(lines) == 5 and lines[-1] == place | {"error": "ValueError: broken"}
    [shown] = (tmp_path / "out").glob("*/needle/*.csv")
    assert [line[2] for line in table(shown)] == ["900", "0", "", ""]  # done, failed, not begun
    monkeypatch.setattr(cluster, "compress", real)
    assert runner.main(typed(argv)) == 0
    assert runner.main(typed(argv | {"save_dir": tmp_path / "whole"})) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "whole")


def test_several_methods_and_budgets_equal_separate_calls(argv, tmp_path):
    together = argv | {"method": "full,snapkv,random", "max_capacity_prompts": "32,64", "e_len": 900}
    assert runner.main(typed(together)) == 0
    alone = together | {"save_dir": tmp_path / "alone"}
    for method in ("fullkv", "snapkv", "random"):
        for budget in (32, 64):
            assert runner.main(typed(alone | {"method": method, "max_capacity_prompts": budget})) == 0
    assert len(rows(tmp_path / "out")) == 6
    assert rows(tmp_path / "out") == rows(tmp_path / "alone")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "alone")


def test_batches_equal_single_rows(argv, tmp_path):
    assert runner.main(typed(argv)) == 0
    assert runner.main(typed(argv | {"save_dir": tmp_path / "batched", "eval_batch_size": 4})) == 0
    [alone], [together] = rows(tmp_path / "out").values(), rows(tmp_path / "batched").values()
    assert [row["pred"] for row in alone] == [row["pred"] for row in together]


def test_shards_and_merge_equal_one_run_and_are_drawn_when_merged(argv, tmp_path):
    assert runner.main(typed(argv)) == 0
    parts = argv | {"save_dir": tmp_path / "parts", "num_shards": 2}
    for shard in (0, 1):
        assert runner.main(typed(parts | {"shard_id": shard})) == 0
        assert not pictures(tmp_path / "parts")
    assert runner.main(typed(parts, "--merge_shards")) == 0
    assert rows(tmp_path / "parts") == rows(tmp_path / "out")
    assert pictures(tmp_path / "parts") == pictures(tmp_path / "out")


# --- resuming


def test_a_larger_grid_extends_a_finished_one(argv, tmp_path, capsys):
    assert runner.main(typed(argv | {"e_len": 900, "depths": "0,100"})) == 0
    before = {row["_id"]: row for lines in rows(tmp_path / "out").values() for row in lines}
    assert runner.main(typed(argv)) == 0
    assert runner.main(typed(argv | {"save_dir": tmp_path / "whole"})) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    assert pictures(tmp_path / "out") == pictures(tmp_path / "whole")
    after = {row["_id"]: row for lines in rows(tmp_path / "out").values() for row in lines}
    assert len(before) == 4 and len(after) == 9 and all(after[name] == row for name, row in before.items())
    capsys.readouterr()
    assert runner.main(typed(argv | {"depths": "0"})) == 2  # a smaller one would drop results
    assert "which is not among this run's 3 examples" in capsys.readouterr().err


def test_killed_in_the_middle_of_a_row_and_resumed(argv, tmp_path):
    argv |= {"method": "snapkv,random"}
    assert runner.main(typed(argv)) == 0
    killed = typed(argv | {"save_dir": tmp_path / "killed"})
    after = random.randrange(2, 18)
    kill_inside_row("run_needle_in_haystack", "question", after, killed)
    assert rows(tmp_path / "killed") != rows(tmp_path / "out") and not pictures(tmp_path / "killed")
    assert runner.main(killed) == 0
    assert rows(tmp_path / "killed") == rows(tmp_path / "out"), f"killed in row {after}"
    assert pictures(tmp_path / "killed") == pictures(tmp_path / "out")


# --- needles, haystacks, the original's flags


def test_several_needles_share_a_picture(argv, tmp_path):
    assert runner.main(typed(argv | {"needle": "all", "e_len": 700})) == 0
    assert runner.main(typed(argv | {"needle": NEEDLES[1].name, "e_len": 700})) == 0
    found = sorted(rows(tmp_path / "out").values(), key=len)
    assert [row["needle"] for row in found[0]] == [NEEDLES[1].name] * 3  # in a file of its own
    lines = found[1]
    assert [row["needle"] for row in lines] == [needle.name for needle in NEEDLES for _ in range(3)]
    assert {row["question"] for row in lines} == {needle.question for needle in NEEDLES}
    assert [len(table(shown)) for shown in (tmp_path / "out").glob("*/needle/*.csv")] == [4, 4]


def test_a_needle_and_a_haystack_of_ones_own(argv, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("The ferry to Lund leaves at noon.\n")
    (tmp_path / "hay").mkdir()
    (tmp_path / "hay" / "a.txt").write_text("Grass is green. " * 50)
    own = argv | {"needle_file": tmp_path / "mine.txt", "question": "When does the ferry leave?"}
    own |= {"haystack_dir": tmp_path / "hay", "e_len": 700, "run_name": "own"}
    assert runner.main(typed(own, "--save_prompts")) == 0
    [lines] = rows(tmp_path / "out").values()
    for row in lines:
        assert row["needle"] == "mine" and row["answers"] == ["The ferry to Lund leaves at noon."]
        assert "Grass is green." in row["prompt"] and row["prompt"].count("The ferry to Lund leaves at noon.") == 1
        assert row["prompt"].endswith("Question: When does the ferry leave?\nAnswer:")
    (tmp_path / "hay" / "a.txt").write_text("Grass is blue. " * 50)
    capsys.readouterr()
    assert runner.main(typed(own)) == 2
    assert "needle.haystack.sha256" in capsys.readouterr().err


def test_a_long_question_takes_its_room_from_the_text(argv, tmp_path):
    (tmp_path / "mine.txt").write_text("The ferry to Lund leaves at noon.\n")
    question = "When does the ferry leave? " + "Think of the timetable that hangs in the office. " * 8
    own = argv | {"needle_file": tmp_path / "mine.txt", "question": question, "s_len": 900, "e_len": 900}
    assert runner.main(typed(own)) == 0
    [lines] = rows(tmp_path / "out").values()
    assert all(row["prompt_tokens"] + 4 <= 900 for row in lines)


def test_the_originals_flags(argv, tmp_path, capsys):
    original = {"model_name": argv.pop("model_path"), "model_provider": "LLaMA3", "model_version": "v"}
    original |= {"max_capacity_prompt": argv.pop("max_capacity_prompts"), "method": "full", "e_len": 700}
    assert runner.main(typed(argv | original)) == 0
    assert "--model_provider LLaMA3 has no effect" in capsys.readouterr().err
    assert list(rows(tmp_path / "out")) == ["tiny_32/needle/v.json"]


def test_the_originals_windows(argv, tmp_path):
    call = argv | {"e_len": 700, "max_capacity_prompts": 64, "depths": 50}
    methods = ("snapkv", "h2o", "cam", "streamingllm", "pyramidkv", "fullkv")
    assert runner.main(typed(call | {"method": ",".join(methods)}, "--anchor_windows")) == 0
    records = [json.loads(path.read_text())["settings"] for path in (tmp_path / "out").glob("*/meta/*.json")]
    found = {r["method"]: r["method_settings"] for r in records}
    assert {m: found[m]["window_size"] for m in ("SnapKV", "H2O", "CAM")} == {"SnapKV": 32, "H2O": 32, "CAM": 32}
    assert found["StreamingLLM"]["sinks"] == 32 and found["PyramidKV"]["window_size"] == 8
    given = call | {"window_size": 16, "save_dir": tmp_path / "given"}
    assert runner.main(typed(given, "--anchor_windows")) == 0
    [record] = (tmp_path / "given").glob("*/meta/*.json")
    assert json.loads(record.read_text())["settings"]["method_settings"]["window_size"] == 16


def test_the_script_runs_the_grid(model, tmp_path):
    script = ROOT / "scripts" / "scripts_needle" / "eval.sh"
    call = ["bash", script, "", "full", "32", "sdpa", f"{tmp_path}/o/", model, "700", "800", "200"]
    done = subprocess.run(call, capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    [lines] = rows(tmp_path / "o" / "results_needle").values()
    assert [row["depth_percent"] for row in lines] == [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
    assert len(pictures(tmp_path / "o" / "results_needle")) == 2


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"method": "fullkv,pyramidkv"}, "--anchor_windows is not read by FullKV or PyramidKV, only by SnapKV"),
        ({"method": "streamingllm"}, "give --max_capacity_prompts above 32"),
        ({"method": "snapkv"}, "--max_capacity_prompts 32 must be larger than the window of 32"),
    ],
)
def test_the_originals_windows_need_a_reader_and_room(argv, changes, told, capsys, monkeypatch, tmp_path):
    assert told in refused(capsys, typed(argv | changes, "--anchor_windows"), monkeypatch, tmp_path / "out")


# --- refusals


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"s_len": 0}, "--s_len 0 must be at least 1 token"),
        ({"step": 0}, "--step 0 must be at least 1 token"),
        ({"e_len": 500}, "--e_len 500 must not be below --s_len 700"),
        ({"s_len": 300}, "--s_len 300: needle longer than the context"),
        ({"e_len": 2100}, "--e_len 2100 is above the model's window of 2048 tokens"),
        ({"s_len": 2000, "e_len": 2000, "max_new_tokens": 1900}, "--s_len 2000: needle longer than the context"),
        ({"depths": "0,101"}, "--depths '0,101': 101 is outside 0 to 100"),
        ({"depths": "-1"}, "--depths '-1': -1 is outside 0 to 100"),
        ({"depths": "0,half"}, "'half' is no whole number of percent"),
        ({"depths": "50,50"}, "50 occurs twice"),
        ({"depth_intervals": 5}, "--depths gives the depths themselves"),
        ({"depth_kind": "sigmoid"}, "--depths gives the depths themselves"),
        ({"depth_kind": "cubic"}, "--depth_kind: invalid choice: 'cubic'"),
        ({"needle": "osterquay"}, "unknown needle 'osterquay'. Did you mean oster-quay"),
        ({"needle": "all", "needle_file": "n.txt"}, "--needle all and --needle_file both name a needle"),
        ({"needle_file": "n.txt"}, "--needle_file n.txt needs --question"),
        ({"question": "Where?"}, "--question is asked about the needle of --needle_file"),
        ({"needle_file": "n.txt", "question": "Where?"}, "--needle_file n.txt cannot be read"),
        ({"haystack_dir": "nowhere"}, "--haystack_dir nowhere does not exist"),
        ({"thinking": "maybe"}, "--thinking 'maybe' is unknown"),
        ({"thinking": "on"}, "has no thinking block"),
        ({"tasks": "vt"}, "unknown argument --tasks"),
        ({"max_capacity_prompts": 8}, "--max_capacity_prompts 8 must be larger than the window"),
    ],
)
def test_bad_arguments_are_one_sentence_before_weights_load(argv, changes, told, capsys, monkeypatch, tmp_path):
    assert told in refused(capsys, typed(argv | changes), monkeypatch, tmp_path / "out")


def test_an_empty_haystack_folder(argv, capsys, monkeypatch, tmp_path):
    (tmp_path / "hay").mkdir()
    call = typed(argv | {"haystack_dir": tmp_path / "hay"})
    assert "holds no .txt file to hide needles in" in refused(capsys, call, monkeypatch, tmp_path / "out")
    (tmp_path / "hay" / "a.txt").write_text(" \n")
    assert "holds no text to hide needles in" in refused(capsys, call, monkeypatch, tmp_path / "out")


# --- the bundled model


@pytest.mark.slow
def test_the_bundled_model_finds_the_needle_where_it_is_kept(tmp_path):
    """FullKV finds it in all of 3 x 3 cells; StreamingLLM with 128 tokens only behind the text, at depth 100."""
    arguments = ["--method", "fullkv,streamingllm", "--model_path", "smollm2", "--device", "cpu", "--quiet"]
    arguments += ["--s_len", "500", "--e_len", "1500", "--step", "500", "--depths", "0,50,100"]
    arguments += ["--max_capacity_prompts", "128", "--kv_cache_granularity", "kv_head", "--save_dir", str(tmp_path)]
    assert runner.main(arguments) == 0
    [full, streaming] = (table(path) for path in sorted(tmp_path.glob("*/needle/*.csv")))
    assert [float(cell) > 0.9 for line in full[1:] for cell in line[1:]] == [True] * 9
    [path] = tmp_path.glob("*/needle/StreamingLLM*.csv")
    assert f"```text\n{path.read_text()}```" in (ROOT / "README.md").read_text()
    by_depth = {int(line[0]): [float(cell) for cell in line[1:]] for line in streaming[1:]}
    assert max(by_depth[0] + by_depth[50]) < 0.2 and min(by_depth[100]) > 0.7
