"""Rescoring from the command line, on our files and on the original's."""

from __future__ import annotations

import csv
import re
import subprocess
import sys

import numpy as np
import pytest
from calls import refused
from rescoring import ROOT, read_json, score_without_torch, write

import eval as scorer
from kvfactory.data.tasks import DEFAULT_DATASETS, TASKS
from kvfactory.reports.eval_files import METHOD_NAMES

ANSWERS = {"passage_retrieval_en": "Paragraph 7", "passage_retrieval_zh": "段落7", "passage_count": "7"}


def row(number, good=True, dataset="hotpotqa", **more):
    """A row as the original writes it, without its prompt and context."""
    answer = ANSWERS.get(dataset.removesuffix("_e"), "cat")
    common = {"input": "q", "answers": [answer], "pred": answer if good else "0", "length": 100, "dataset": dataset}
    return {**common, "language": "en", "all_classes": ["cat", "0"], "_id": f"id{number}", **more}


def share(good, n, dataset="hotpotqa", **more):
    """n rows of which `good` score 1."""
    return [row(i, i < good, dataset, **more) for i in range(n)]


def run(*argv):
    return scorer.main([str(a) for a in argv])


def read_csv(folder):
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        return {r["method"]: r for r in csv.DictReader(file)}


def scores(folder):
    """results.json, and its rows by method."""
    data = read_json(folder)
    return data, {r["method"]: r for r in data["rows"]}


# --- the original's evaluation bugs


def test_every_method_is_under_its_own_label(tmp_path):
    # the original swaps the rows of CAM and L2Norm and has none for half of the methods
    for i, name in enumerate(METHOD_NAMES):
        write(tmp_path / "hotpotqa" / f"{name}.json", share(i, 20))
    assert run("--results_dir", tmp_path) == 0
    table = read_csv(tmp_path)
    assert {name: float(table[name]["hotpotqa"]) for name in table} == {
        name: 5.0 * i for i, name in enumerate(METHOD_NAMES)
    }
    assert list(table) == list(METHOD_NAMES)


def test_file_names_in_any_case_and_unknown_methods(tmp_path):
    write(tmp_path / "HotpotQA" / "pyramidkv.json", share(1, 2))
    write(tmp_path / "qasper" / "PyramidKV.json", share(1, 1))
    write(tmp_path / "qasper" / "cam+kv_head.json", share(0, 1))
    write(tmp_path / "qasper" / "myMethod.json", share(1, 1))
    assert run("--results_dir", tmp_path) == 0
    table = read_csv(tmp_path)
    assert list(table) == ["PyramidKV", "CAM+kv_head", "myMethod"]
    assert (table["PyramidKV"]["qasper"], table["PyramidKV"]["hotpotqa"]) == ("100.0", "50.0")


def test_an_empty_file_is_reported_and_ends_nothing(tmp_path, capsys):
    write(tmp_path / "hotpotqa" / "FullKV.json", [])
    write(tmp_path / "qasper" / "FullKV.json", share(1, 1))
    assert run("--results_dir", tmp_path) == 0
    assert "hotpotqa/FullKV.json: the file is empty" in capsys.readouterr().out
    assert read_csv(tmp_path)["FullKV"]["hotpotqa"] == ""
    _, rows = scores(tmp_path)
    assert rows["FullKV"]["datasets"]["hotpotqa"]["score"] is None
    assert "(0<200)" in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_every_row_has_its_own_classes(tmp_path):
    # the original takes the class list of the last line for the whole file
    rows = [
        row(0, dataset="trec", all_classes=["cat", "dog"]),
        row(1, dataset="trec", all_classes=["bird", "cat", "at"]),
    ]
    write(tmp_path / "trec" / "FullKV.json", rows)
    assert run("--results_dir", tmp_path) == 0
    # row 1: "at" is in the prediction and in the answer, so it is removed; both rows score 1
    assert read_csv(tmp_path)["FullKV"]["trec"] == "100.0"
    rows[1]["answers"], rows[1]["pred"] = ["bird"], "bird at"
    write(tmp_path / "trec" / "FullKV.json", rows)
    assert run("--results_dir", tmp_path) == 0
    assert read_csv(tmp_path)["FullKV"]["trec"] == "75.0"


def test_longbench_e_buckets_and_no_nan(tmp_path):
    lengths = [(0, True), (3999, False), (4000, True), (7999, True)]
    write(tmp_path / "qasper_e" / "FullKV.json", [row(i, g, length=n) for i, (n, g) in enumerate(lengths)])
    lengths += [(8000, False), (90000, True), (1, False)]
    write(tmp_path / "qasper_e" / "SnapKV.json", [row(i, g, length=n) for i, (n, g) in enumerate(lengths)])
    write(tmp_path / "qasper" / "SnapKV.json", share(1, 2))
    assert run("--results_dir", tmp_path) == 0
    _, rows = scores(tmp_path)
    full, snap = (rows[m]["datasets"]["qasper_e"] for m in ("FullKV", "SnapKV"))
    assert full["buckets"] == {"0-4k": 50.0, "4-8k": 100.0, "8k+": None}
    assert full["bucket_mean"] is None and full["score"] == 75.0
    assert snap["buckets"] == {"0-4k": 33.33, "4-8k": 100.0, "8k+": 50.0}
    assert snap["bucket_mean"] == 61.11 and snap["score"] == 57.14
    assert "buckets" not in rows["SnapKV"]["datasets"]["qasper"]
    assert rows["FullKV"]["datasets"]["qasper"] is None
    for file in ("results.csv", "results.md", "results.json"):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert "nan" not in text.lower() and "{'" not in text and "-1" not in text
    cells = read_csv(tmp_path)["SnapKV"]
    assert (cells["qasper_e"], cells["qasper_e_4-8k"], cells["qasper_e_bucket_mean"]) == ("57.14", "100.0", "61.11")


# --- tables


def test_columns_averages_and_categories(tmp_path):
    for i, name in enumerate(DEFAULT_DATASETS):
        write(tmp_path / name / "FullKV.json", share(i % 3, 2, name))
        if name != "lcc":
            write(tmp_path / name / "SnapKV.json", share(2, 2, name))
    assert run("--results_dir", tmp_path) == 0
    table = read_csv(tmp_path)
    header = list(table["FullKV"])
    assert header[2:18] == list(DEFAULT_DATASETS)
    assert header[18:24] == ["single_doc_qa", "multi_doc_qa", "summarization", "few_shot", "synthetic", "code"]
    cells = {name: float(table["FullKV"][name]) for name in DEFAULT_DATASETS}
    assert float(table["FullKV"]["avg 16 default"]) == round(np.mean(list(cells.values())), 2)
    members = {c: [cells[n] for n in cells if TASKS[n].category == c] for c in header[18:24]}
    means = {c: round(sum(v) / len(v), 2) for c, v in members.items()}
    assert {c: float(table["FullKV"][c]) for c in means} == means
    assert float(table["FullKV"]["mean of 6 categories"]) == pytest.approx(np.mean(list(means.values())), abs=0.006)
    snap = table["SnapKV"]
    # never a mean over what is there when something is missing
    assert [snap[c] for c in ("lcc", "code", "avg 16 default", "mean of 6 categories")] == [""] * 4
    assert snap["few_shot"] == "100.0" and snap["n_missing"] == "1"
    common = next(c for c in header if c.startswith("avg of 15 common"))
    assert "lcc" not in common and "repobench-p" in common and snap[common] == "100.0"


def test_counts_costs_and_standard_error(tmp_path):
    costs = {"bytes_full": 1000, "prefill_s": 1.0, "decode_s": 2.0, "kept_tokens": {"mean": 64}}
    rows = [row(i, i < 2, bytes_end=100 * i, truncated=i == 0, **costs) for i in range(4)]
    rows[3]["pred"] = " \n"
    write(tmp_path / "hotpotqa" / "SnapKV+kv_head.json", [*rows, {"_id": "x", "dataset": "hotpotqa", "error": "OOM"}])
    write(tmp_path / "hotpotqa" / "H2O.json", share(1, 1))
    assert run("--results_dir", tmp_path) == 0
    snap, h2o = read_csv(tmp_path)["SnapKV+kv_head"], read_csv(tmp_path)["H2O"]
    assert [snap[k] for k in ("hotpotqa", "n", "n_empty", "n_error", "n_truncated")] == ["50.0", "4", "1", "1", "1"]
    assert [float(snap[k]) for k in ("bytes_end", "bytes_full", "ratio", "kept_tokens", "seconds")] == [
        *(150.0, 1000.0, 0.15, 64.0, 3.0)
    ]
    # sd of (1, 1, 0, 0) with n - 1 is sqrt(1/3), over sqrt(4)
    assert float(snap["hotpotqa_stderr"]) == pytest.approx(100 * (1 / 3) ** 0.5 / 2, abs=1e-12)
    assert [h2o[k] for k in ("hotpotqa_stderr", "n_truncated", "bytes_end", "ratio", "seconds")] == [""] * 5


def test_incomplete_datasets_are_marked(tmp_path):
    write(
        tmp_path / "meta" / "SnapKV+kv_head.json",
        [{"datasets": {"hotpotqa": {"examples": 4}, "qasper": {"examples": 2}}}],
    )
    write(tmp_path / "hotpotqa" / "SnapKV+kv_head.json", share(3, 3))
    write(tmp_path / "qasper" / "SnapKV+kv_head.json", share(2, 2))
    write(tmp_path / "qasper_e" / "H2O.json", [*share(1, 1), {"_id": "x", "error": "OOM"}])
    assert run("--results_dir", tmp_path) == 0
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "100.00 (3<4)" in text and "100.00 (1<2)" in text
    assert text.count("<") == 4  # the legend, qasper_e in two tables, hotpotqa; the complete qasper has no mark
    assert "Fewer examples than LongBench has: qasper 2 of 200, hotpotqa 4 of 200." in text
    assert read_csv(tmp_path)["SnapKV+kv_head"]["incomplete"] == "hotpotqa:3<4"
    assert run("--results_dir", tmp_path, "--errors_as_zero") == 0
    h2o = read_csv(tmp_path)["H2O"]
    assert (h2o["qasper_e"], h2o["n"], h2o["n_error"], h2o["incomplete"]) == ("50.0", "2", "1", "")


def test_captions_come_from_the_run_record(tmp_path):
    record = {"preset": "factory", "protocol": "longbench", "prompts": "kvfactory"}
    write(tmp_path / "meta" / "SnapKV.json", [{**record, "granularity": "query_head", "notes": ["a recalled beta"]}])
    write(
        tmp_path / "meta" / "h2o+kv_head.json",
        [{"settings": {**record, "preset": "paper", "kv_cache_granularity": "kv_head"}}],
    )
    for name in ("SnapKV", "H2O+kv_head"):
        write(tmp_path / "hotpotqa" / f"{name}.json", share(1, 2))
    assert run("--results_dir", tmp_path) == 0
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "- preset: paper (H2O+kv_head); factory (SnapKV)\n" in text
    assert "- protocol: longbench\n- prompts: kvfactory\n" in text
    assert "not comparable with published ones" in text
    assert "- note: SnapKV: a recalled beta\n" in text
    assert "| SnapKV (query_head) |" in text and "| H2O+kv_head " in text
    write(tmp_path / "meta" / "SnapKV.json", [{**record, "prompts": "longbench"}])
    write(tmp_path / "meta" / "h2o+kv_head.json", [{**record, "prompts": "longbench"}])
    assert run("--results_dir", tmp_path) == 0
    assert "not comparable" not in (tmp_path / "results.md").read_text(encoding="utf-8")


def test_query_head_shows_without_a_record_too(tmp_path):
    for name in ("FullKV", "SnapKV", "SnapKV+kv_head", "H2O"):
        more = {} if name == "H2O" else {"bytes_end": 10, "bytes_full": 10}
        write(tmp_path / "hotpotqa" / f"{name}.json", share(1, 2, **more))
    assert run("--results_dir", tmp_path) == 0
    granularity = {name: r["granularity"] for name, r in read_csv(tmp_path).items()}
    # FullKV is stored at kv heads either way; nothing says how the original stored H2O
    assert granularity == {"FullKV": "", "SnapKV": "query_head", "SnapKV+kv_head": "kv_head", "H2O": ""}


def test_a_parent_folder_gives_a_table_a_run_and_one_for_all(tmp_path, capsys):
    write(tmp_path / "m_64" / "hotpotqa" / "SnapKV.json", share(1, 4))
    write(tmp_path / "m_128" / "qasper" / "SnapKV.json", share(2, 4))
    assert run("--results_dir", tmp_path) == 0
    assert read_csv(tmp_path / "m_64")["SnapKV"]["hotpotqa"] == "25.0"
    assert "qasper" not in read_csv(tmp_path / "m_64")["SnapKV"]
    data, _ = scores(tmp_path)
    assert [(r["run"], r["datasets"]["qasper"] and r["datasets"]["qasper"]["score"]) for r in data["rows"]] == [
        *(("m_128", 50.0), ("m_64", None))
    ]
    out = capsys.readouterr().out
    assert out.index("## m_128") < out.index("## m_64") < out.index(f"## {tmp_path.name}")


def test_terminal_output_breaks_into_blocks_that_fit(tmp_path, monkeypatch, capsys):
    for name in ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"):
        write(tmp_path / name / "SnapKV.json", share(1, 2))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run("--results_dir", tmp_path) == 0
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert max(map(len, tables)) <= 60
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert run("--results_dir", tmp_path) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 60  # a pipe gets whole lines
    assert sum("narrativeqa" in line for line in tables) == 2  # scores and standard errors
    assert (tmp_path / "results.md").read_text(encoding="utf-8").count("| method") == 3


# --- rescoring and reading


def test_a_stored_score_that_differs_is_reported(tmp_path, capsys):
    rows = [row(0, True, score=1.0), row(1, True, score=0.5), row(2, False, score=0.0)]
    write(tmp_path / "hotpotqa" / "SnapKV.json", rows)
    assert run("--results_dir", tmp_path) == 0
    out = capsys.readouterr().out
    assert "hotpotqa/SnapKV.json: the stored score of 1 rows is not what rescoring gives (first: id1)" in out
    assert read_csv(tmp_path)["SnapKV"]["hotpotqa"] == "66.67"
    rows[1]["score"] = 1.0
    write(tmp_path / "hotpotqa" / "SnapKV.json", rows)
    run("--results_dir", tmp_path)
    assert "stored score" not in capsys.readouterr().out


def test_torn_line_shards_and_strange_names_are_notes(tmp_path, capsys):
    write(tmp_path / "hotpotqa" / "SnapKV.json", share(1, 2), end='{"_id": "id9", "pr')
    write(tmp_path / "hotpotqa" / "SnapKV.shard0.json", share(0, 2))
    write(tmp_path / "hotpotqa" / "SnapKV.shard1of2.json", share(0, 2))
    (tmp_path / "hotpotqa" / "metrics.json").write_text('{\n  "hotpotqa": 12.5\n}')
    write(tmp_path / "ruler_task" / "SnapKV.json", share(0, 2))
    assert run("--results_dir", tmp_path) == 0
    out = capsys.readouterr().out
    assert "hotpotqa/SnapKV.json: a torn last line is left out" in out
    assert "shard files that must be merged first (SnapKV.shard0.json, SnapKV.shard1of2.json)" in out
    assert "ruler_task/ is ignored" in out
    assert list(read_csv(tmp_path)) == ["SnapKV"] and read_csv(tmp_path)["SnapKV"]["hotpotqa"] == "50.0"


def test_a_folder_of_shards_alone_is_refused_or_named(tmp_path, capsys):
    parts, whole = tmp_path / "parts_512", tmp_path / "whole_512"
    write(parts / "hotpotqa" / "SnapKV.shard0of2.json", share(1, 2))
    for folder in (parts, tmp_path):
        assert run("--results_dir", folder) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{parts}: there are results of shards alone; join them first" in error
    write(whole / "hotpotqa" / "SnapKV.json", share(1, 2))
    assert run("--results_dir", tmp_path) == 0
    assert "parts_512 is left out: hotpotqa/ holds shard files that must be merged first" in capsys.readouterr().out
    assert not (parts / "results.md").exists() and read_csv(whole)["SnapKV"]["hotpotqa"] == "50.0"


def test_a_retried_failure_counts_once(tmp_path):
    failed = {"_id": "id1", "dataset": "hotpotqa", "error": "OOM"}
    write(tmp_path / "hotpotqa" / "SnapKV.json", [row(0), failed, row(1, False), row(0)])
    assert run("--results_dir", tmp_path) == 0
    cells = read_csv(tmp_path)["SnapKV"]
    assert (cells["hotpotqa"], cells["n"], cells["n_error"]) == ("50.0", "2", "0")


def test_line_separators_inside_texts_are_data(tmp_path):
    write(tmp_path / "hotpotqa" / "SnapKV.json", [row(0, pred="cat\u2028\x0b", answers=["cat"]), row(1)])
    assert run("--results_dir", tmp_path) == 0
    assert read_csv(tmp_path)["SnapKV"]["n"] == "2"


def test_extra_metrics_on_request(tmp_path):
    write(tmp_path / "trec" / "SnapKV.json", [row(0, all_classes=["c", "ca", "cat"]), {"_id": "x", "error": "OOM"}])
    assert run("--results_dir", tmp_path, "--extra_metrics", "--errors_as_zero") == 0
    _, rows = scores(tmp_path)
    # c goes and ca is skipped: 1/2; without the skip 1; the failed example is a zero in both
    cell = rows["SnapKV"]["datasets"]["trec"]
    assert (cell["score"], cell["extra"]) == (25.0, {"clean_classification": 50.0})
    assert run("--results_dir", tmp_path) == 0
    assert scores(tmp_path)[1]["SnapKV"]["datasets"]["trec"]["extra"] == {}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: p / "nowhere", "nowhere is not a folder"),
        (lambda p: p, "holds no result files"),
        (lambda p: write(p / "hotpotqa" / "SnapKV.json", share(1, 1)).parent, "give the folder above it"),
        (
            lambda p: write(p / "hotpotqa" / "S.json", [row(0)], end='{"_id\n{"_id": "b"}\n').parent.parent,
            "S.json line 2",
        ),
        (
            lambda p: write(p / "hotpotqa" / "S.json", [{"_id": "a"}]).parent.parent,
            "S.json line 1 needs the fields pred",
        ),
        (
            lambda p: write(p / "trec" / "S.json", [row(7, all_classes=None)]).parent.parent,
            "S.json, _id id7: .*all_classes",
        ),
        (
            lambda p: [write(p / "qasper" / n, share(1, 1)) for n in ("h2o.json", "H2O.json")][0].parent.parent,
            "both stand",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, capsys, make, message):
    error = refused(capsys, scorer.main, ["--results_dir", str(make(tmp_path))])
    assert re.search(message, error), error


# --- from the shell


def test_runs_without_torch(tmp_path):
    write(tmp_path / "hotpotqa" / "SnapKV.json", share(1, 2))
    score_without_torch("eval.py", tmp_path)
    assert read_csv(tmp_path)["SnapKV"]["hotpotqa"] == "50.0"


def test_compare_from_the_command_line(tmp_path, capsys):
    a = write(tmp_path / "hotpotqa" / "FullKV.json", share(2, 4))
    b = write(tmp_path / "hotpotqa" / "SnapKV.json", share(1, 4))
    assert run("compare", a, b) == 0
    assert "-25.00" in capsys.readouterr().out
    assert "none.json" in refused(capsys, scorer.main, ["compare", str(a), str(tmp_path / "none.json")])


def test_metrics_sh(tmp_path):
    write(tmp_path / "hotpotqa" / "SnapKV.json", share(1, 2))
    script = ROOT / "scripts" / "scripts_longBench" / "metrics.sh"

    def shell(*arguments):
        command = ["bash", str(script), *arguments]
        environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    assert shell(str(tmp_path)).returncode == 0
    assert (tmp_path / "results.csv").is_file()
    for arguments in ((), (str(tmp_path), "extra")):
        result = shell(*arguments)
        assert result.returncode == 2 and result.stderr.startswith("usage:")


def test_method_names_are_the_registrys():
    methods = pytest.importorskip("kvfactory.methods", reason="needs torch")
    assert set(methods.METHODS.names()) <= set(METHOD_NAMES)
