"""Rows, the proof of compression, errors and the table, with the runner inside this process on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from calls import comparable
from in_process import Runner, fail_at
from tiny_checkpoint import make_record, write_records

from kvfactory.data.own_prompts import OWN_PROMPTS
from kvfactory.generation import generate_rows
from kvfactory.methods import METHODS
from kvfactory.reports.eval_files import find_runs
from kvfactory.reports.eval_tables import score_run
from kvfactory.summary import summary

ROW_FIELDS = (
    *("input", "answers", "pred", "length", "dataset", "language", "all_classes", "_id", "score"),
    *("prompt_tokens", "prompt_tokens_raw", "truncated", "question_seen", "new_tokens", "think_tokens", "finish"),
    *("prefill_s", "decode_s", "rows_in_flight", "near_ties", "peak_mem_bytes"),
    *("bytes_prompt", "bytes_end", "bytes_aux", "bytes_alloc", "bytes_full"),
    *("budget_means", "kept_tokens", "tokens_attended", "compressed"),
)


def test_a_row_has_exactly_the_agreed_fields(run):
    assert run("--method", "snapkv", "--max_capacity_prompts", 32) == 0
    assert run.paths().results("hotpotqa").relative_to(run.save_dir).parts[0] == "tiny_32"
    for dataset, count in (("hotpotqa", 3), ("trec", 2)):
        rows = run.rows(dataset)
        assert [row["_id"] for row in rows] == [f"{dataset}-{i}" for i in range(count)]
        assert all(tuple(row) == ROW_FIELDS for row in rows)


def test_what_a_row_says_about_its_cache(run):
    run("--method", "snapkv,pyramidkv,fullkv,oracle,streamingllm", "--max_capacity_prompts", 32)
    rows = {planned.plan.method: run.rows(number=i)[0] for i, planned in enumerate(run.last.runs)}
    prompt = rows["SnapKV"]["prompt_tokens"]
    token = 2 * 8 * 4  # bytes of one token in one head: key and value, head size 8, float32
    new = rows["SnapKV"]["new_tokens"] - 1  # the last token is not fed back
    snap = rows["SnapKV"]
    assert snap["bytes_prompt"] == 3 * 4 * 32 * token  # 3 layers, 4 query heads
    assert snap["bytes_end"] == 3 * 4 * (32 + new) * token
    assert snap["bytes_full"] == 3 * 2 * (prompt + new) * token
    assert snap["bytes_alloc"] >= snap["bytes_end"] and snap["bytes_aux"] == 0
    assert snap["kept_tokens"] == {"min": 32, "mean": 32, "max": 32, "per_layer": [32, 32, 32]}
    assert (snap["tokens_attended"], snap["compressed"], snap["budget_means"]) == (32 + new, True, "slots per head")
    pyramid = rows["PyramidKV"]["kept_tokens"]
    assert pyramid["per_layer"] == sorted(pyramid["per_layer"], reverse=True) and pyramid["max"] > pyramid["min"]
    assert (pyramid["min"], pyramid["max"]) == (pyramid["per_layer"][-1], pyramid["per_layer"][0])
    assert pyramid["mean"] == pytest.approx(sum(pyramid["per_layer"]) / 3)
    full = rows["FullKV"]
    assert full["bytes_end"] == full["bytes_full"] and not full["compressed"] and full["budget_means"] == "none"
    assert full["tokens_attended"] == prompt + full["new_tokens"] - 1
    assert rows["Oracle"]["tokens_attended"] == 32 and rows["Oracle"]["bytes_end"] == rows["Oracle"]["bytes_full"]
    assert rows["StreamingLLM"]["bytes_prompt"] == 3 * 2 * 32 * token  # the same for all heads: stored at kv heads


def test_a_method_that_evicts_while_decoding_stays_at_its_budget(run):
    run("--method", "h2o", "--max_capacity_prompts", 32, "--decode_evict", "on")
    row = run.rows()[0]
    assert row["tokens_attended"] == row["kept_tokens"]["mean"] == 32
    assert row["bytes_end"] == row["bytes_prompt"]


def test_heads_of_different_budgets(run):
    run("--method", "adakv", "--max_capacity_prompts", 40)
    kept = run.rows()[0]["kept_tokens"]
    assert kept["min"] < 40 < kept["max"] and kept["mean"] == pytest.approx(40, abs=1)
    assert run.rows()[0]["tokens_attended"] == pytest.approx(kept["mean"] + run.rows()[0]["new_tokens"] - 1)


def test_a_file_that_a_setting_names_counts_by_its_content(run, tmp_path):
    def label(name, score):
        scores = {f"{layer}-{head}": [score * (head + 1)] for layer in range(3) for head in range(4)}
        (tmp_path / name).write_text(json.dumps(scores))
        return run.job("--method", "headkv", "--head_path", tmp_path / name).runs[0].paths.label

    assert label("a.json", 1.0) == label("b.json", 1.0) != label("c.json", 0.5)


def test_a_prompt_below_the_budget_is_not_compressed(run):
    run("--method", "snapkv", "--max_capacity_prompts", 1500)
    row = run.rows()[0]
    assert not row["compressed"] and row["bytes_end"] == row["bytes_full"]
    assert row["kept_tokens"]["mean"] == row["prompt_tokens"]


def test_several_methods_and_budgets_equal_separate_calls(model, data, tmp_path):
    methods, budgets = ("snapkv", "h2o", "random"), (16, 64)
    together = Runner(model, data, tmp_path / "together")
    assert together("--method", ",".join(methods), "--max_capacity_prompts", "16,64") == 0
    for i, budget in enumerate(budgets):
        for j, method in enumerate(methods):
            alone = Runner(model, data, tmp_path / f"{method}{budget}")
            assert alone("--method", method, "--max_capacity_prompts", budget) == 0
            number = i * len(methods) + j
            assert alone.paths().results("trec").relative_to(alone.save_dir) == (
                together.paths(number).results("trec").relative_to(together.save_dir)
            )
            for dataset in ("hotpotqa", "trec"):
                assert comparable(alone.rows(dataset)) == comparable(together.rows(dataset, number))
            ours, theirs = alone.record(), together.record(number)
            assert (ours["settings"], ours["datasets"]) == (theirs["settings"], theirs["datasets"])


def test_what_no_budget_changes_is_decoded_once(run, monkeypatch):
    """FullKV under three budgets is one row per prompt, written to three files; SnapKV is three."""
    asked = []

    def counted(model, requests, **options):
        def watched():
            for request in requests:
                asked.append([plan.method for plan in request.plans])
                yield request

        return generate_rows(model, watched(), **options)

    monkeypatch.setattr("kvfactory.runner.generate_rows", counted)
    assert run("--method", "fullkv,snapkv", "--max_capacity_prompts", "32,48,64", "--datasets", "hotpotqa") == 0
    assert asked == [["FullKV", "SnapKV", "SnapKV", "SnapKV"]] * 3
    full = [run.rows(number=i) for i, planned in enumerate(run.last.runs) if planned.plan.method == "FullKV"]
    assert len(full) == 3 and comparable(full[0]) == comparable(full[1]) == comparable(full[2])
    run.paths(2).results("hotpotqa").unlink()  # FullKV's file under the second budget
    asked.clear()
    assert run("--method", "fullkv,snapkv", "--max_capacity_prompts", "32,48,64", "--datasets", "hotpotqa") == 0
    assert asked == [["FullKV"]] * 3 and comparable(run.rows(number=2)) == comparable(full[0])


def test_the_hf_path_gives_the_same_tokens_in_a_file_of_its_own(run):
    run("--method", "snapkv", "--max_capacity_prompts", 32)
    ours, name = run.rows(), run.paths().label
    run("--method", "snapkv", "--max_capacity_prompts", 32, "--decode", "hf")
    theirs = run.rows()
    assert run.paths().label != name
    assert [row["pred"] for row in ours] == [row["pred"] for row in theirs]
    assert all(row["bytes_prompt"] is None and row["prefill_s"] is None for row in theirs)
    assert [row["bytes_end"] for row in ours] == [row["bytes_end"] for row in theirs]


def test_prompt_and_context_are_saved_on_request(run, data):
    run("--method", "fullkv", "--save_prompts", "--save_context")
    record = json.loads((data / "hotpotqa.jsonl").read_text().splitlines()[0])
    row = run.rows()[0]
    assert row["context"] == record["context"]
    assert row["prompt"] == OWN_PROMPTS["hotpotqa"].format(**record)


def test_long_prompts_are_cut_and_counted(run):
    run("--method", "snapkv", "--max_capacity_prompts", 32, "--max_input_length", 200)
    rows = run.rows("trec")
    assert all(row["truncated"] and row["prompt_tokens"] <= 200 < row["prompt_tokens_raw"] for row in rows)
    assert run.record()["counts"]["trec"]["truncated"] == 2


def test_randomised_methods_draw_anew_for_every_example(run, data):
    twins = [make_record("hotpotqa", 0) | {"_id": name} for name in ("a", "b")]
    write_records(data, "hotpotqa", twins)
    run("--method", "random,snapkv", "--max_capacity_prompts", 16)
    preds = [[row["pred"] for row in run.rows(number=number)] for number in (0, 1)]
    assert preds[0][0] != preds[0][1] and preds[1][0] == preds[1][1]
    run("--method", "random,snapkv", "--max_capacity_prompts", 16, "--seed", 7)
    assert run.rows()[0]["pred"] != preds[0][0] and run.rows(number=1)[0]["pred"] == preds[1][0]


def test_randomised_methods_do_not_depend_on_order_or_shard(run, model, data, tmp_path):
    run("--method", "random", "--max_capacity_prompts", 32)
    rows = {row["_id"]: row["pred"] for row in run.rows()}
    shard = ("--num_shards", 3, "--shard_id", 2)
    run("--method", "random", "--max_capacity_prompts", 32, *shard)
    assert not list(run.save_dir.rglob("*shard*"))  # the undivided run has everything
    part = Runner(model, data, tmp_path / "part")
    part("--method", "random", "--max_capacity_prompts", 32, *shard)
    assert [(row["_id"], row["pred"]) for row in part.rows()] == [("hotpotqa-2", rows["hotpotqa-2"])]


# --- proof of compression


def test_a_layer_that_holds_something_else_is_an_error_that_names_it(run, monkeypatch):
    cluster = METHODS.get("snapkv")
    honest = cluster.declared

    def declared(self, context):
        counts = honest(self, context)
        return [n - 1 for n in counts] if self.shape.layer_idx == 1 else counts

    monkeypatch.setattr(cluster, "declared", declared)
    assert run("--method", "snapkv", "--max_capacity_prompts", 32) == 1
    row = run.rows()[0]
    assert set(row) == {"_id", "dataset", "error"}
    assert "hotpotqa/hotpotqa-0, layer 1: SnapKV: 128 slots are stored and 124 to 124 declared" in row["error"]


# --- errors


def test_a_failed_example_is_recorded_and_tried_again(run, monkeypatch, capsys):
    watch = fail_at(monkeypatch, "hotpotqa/hotpotqa-1", torch.OutOfMemoryError("no memory left"))
    assert run("--method", "snapkv") == 1
    assert len(watch.seen) == 5
    assert run.rows()[1] == {"_id": "hotpotqa-1", "dataset": "hotpotqa", "error": "OutOfMemoryError: no memory left"}
    assert run.record()["counts"]["hotpotqa"]["failed"] == 1 and run.record()["segments"][0]["exit"] == 1
    assert "failed: hotpotqa/hotpotqa-1: OutOfMemoryError" in capsys.readouterr().err
    assert "4 of 5" in summary(run.last)
    assert run("--method", "snapkv") == 0
    assert watch.seen[5:] == ["hotpotqa/hotpotqa-1"]
    assert [row["_id"] for row in run.rows()] == [f"hotpotqa-{i}" for i in range(3)]
    assert all("error" not in row for row in run.rows())


def test_fail_fast_stops_at_the_first(run, monkeypatch):
    watch = fail_at(monkeypatch, "hotpotqa/hotpotqa-1", ValueError("broken"))
    assert run("--method", "snapkv", "--fail_fast") == 1
    assert watch.seen == ["hotpotqa/hotpotqa-0", "hotpotqa/hotpotqa-1"]
    assert "error" in run.rows()[-1] and run.rows("trec") == []


def test_errors_as_zero_lowers_the_score_of_the_table(run, data, monkeypatch):
    fail_at(monkeypatch, "hotpotqa/hotpotqa-1", ValueError("broken"))
    run("--method", "snapkv")
    path = run.paths().results("hotpotqa")
    rows = [row | ({"pred": row["answers"][0], "score": 1.0} if "error" not in row else {}) for row in run.rows()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trec = run.paths().results("trec")
    rows = [row | {"pred": row["answers"][0], "score": 1.0} for row in run.rows("trec")]
    trec.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "100.00" in summary(run.last)
    assert "83.34" in summary(run.job("--method", "snapkv", "--errors_as_zero"))  # (66.67 + 100) / 2


def test_a_ratio_that_leaves_too_little_is_an_error_of_that_example(run, data):
    write_records(data, "hotpotqa", [make_record("hotpotqa", 0, 4), make_record("hotpotqa", 1, 120)])
    assert run("--method", "snapkv", "--max_capacity_prompts_ratio", "0.02") == 1
    rows = run.rows()
    assert "must be larger than the window" in rows[0]["error"] and "error" not in rows[1]
    assert run.paths().folder.name == "tiny_r0.02"
    assert rows[1]["kept_tokens"]["mean"] == round(rows[1]["prompt_tokens"] * 0.02)


# --- table


def test_the_table_names_what_it_averages(run):
    run.common = run.common[: run.common.index("--max_new_tokens")]
    run("--method", "snapkv,fullkv", "--max_capacity_prompts", 32, "--kv_cache_granularity", "kv_head")
    text = summary(run.last)
    lines = text.splitlines()
    assert "| SnapKV+kv_head | kv_head" in lines[2] and "| FullKV+kv_head | -" in lines[3]
    assert len({len(line) for line in lines[:4]}) == 1
    assert "mean over 2 dataset(s): hotpotqa, trec" in text and f"--results_dir {run.paths().folder}" in text
    snap = [cell.strip() for cell in lines[2].split("|")]
    assert snap[3:6] == ["32", "2", "5"] and snap[7] == "32.0"


def test_the_average_is_the_one_that_eval_shows(run):
    """Of dataset scores with two decimals, here 33.33 and 0: the mean of unrounded ones would be 16.67."""
    run("--method", "snapkv")
    for name, good in (("hotpotqa", 1), ("trec", 0)):
        rows = [row | {"pred": row["answers"][0] if i < good else "", "score": float(i < good)}
                for i, row in enumerate(run.rows(name))]  # fmt: skip
        run.paths().results(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = score_run(find_runs(run.paths().folder)[0]).rows
    assert row.mean_over(("hotpotqa", "trec")) == 16.66 and "| 16.66 |" in summary(run.last)


def test_a_shard_says_what_comes_before_scoring_again(run):
    run("--method", "snapkv", "--num_shards", 2, "--shard_id", 0)
    last = summary(run.last).splitlines()[-1]
    assert last.startswith(
        "when all shards are done: the same call with --merge_shards instead of --shard_id, then python"
    )
    with pytest.raises(ValueError, match="512: there are results of shards alone; join them first"):
        find_runs(run.save_dir)
