"""RULER result files scored again from the command line: ours and the original's, one length and many."""

from __future__ import annotations

import csv
import re

import pytest
from calls import refused
from rescoring import read_json, score_without_torch, write

import eval_ruler
from kvfactory.ruler.tasks import RULER_TASKS


def row(index, pred, answers=("cat", "dog"), task="vt", **more):
    """A row of our runner; `score` only where a test gives it."""
    row = {"_id": str(index), "index": index, "input": "q", "answers": list(answers), "pred": pred, "length": 4000}
    return row | {"dataset": task} | more


def original(index, pred, answers=("cat", "dog")):
    return {"prompt": f"p{index}", "input": "q", "answers": list(answers), "pred": pred, "length": 4000}


def record(folder, label, datasets, notes=(), **settings):
    data = {"settings": settings, "notes": list(notes), "datasets": {k: {"examples": n} for k, n in datasets.items()}}
    write(folder / "meta" / f"{label}.json", [data])


def run(*argv):
    return eval_ruler.main([str(a) for a in argv])


def read_csv(folder):
    with open(folder / "results.csv", encoding="utf-8", newline="") as file:
        return {(r["method"], int(r["length"])): r for r in csv.DictReader(file)}


def read_md(folder):
    """(captions and notes, {first cells: rest} of the first table, the same of the second)"""
    text = (folder / "results.md").read_text(encoding="utf-8")
    tables = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M):
        tables.append([[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()])
    return text, *tables


@pytest.fixture
def folder(tmp_path):
    """Two methods, two lengths, two tasks; SnapKV lacks cwe at 8192. Scores worked out by hand."""
    run = tmp_path / "results_ruler" / "model_512"
    sizes = {"bytes_end": 10, "bytes_full": 40}
    full = {"bytes_end": 40, "bytes_full": 40}
    for length in (4096, 8192):
        write(run / str(length) / "vt" / "FullKV.json", [row(i, "Cat, DOG", **full) for i in range(4)])
        write(run / str(length) / "cwe" / "FullKV.json", [row(i, "dog", task="cwe", **full) for i in range(2)])
    # vt: 1, 0.5, 0, 0 -> 37.5; sample standard deviation sqrt(0.6875 / 3), error 100 * that / 2
    preds = ["a dog\tand a cat", "dog", "", "bird"]
    write(run / "4096" / "vt" / "snapkv.json", [row(i, p, **sizes) for i, p in enumerate(preds)])
    # cwe: 1, 0.5 -> 75; standard deviation sqrt(0.125), error 100 * that / sqrt(2) = 25
    write(run / "4096" / "cwe" / "SnapKV.json", [row(i, p, task="cwe", **sizes) for i, p in enumerate(preds[:2])])
    write(run / "8192" / "VT" / "SNAPKV.json", [row(i, p, **sizes) for i, p in enumerate(preds)])
    return run


def test_cells_averages_and_errors(folder, capsys):
    assert run("--results_dir", folder) == 0
    table = read_csv(folder)
    assert list(table) == [("FullKV", 4096), ("FullKV", 8192), ("SnapKV", 4096), ("SnapKV", 8192)]
    snap = table["SnapKV", 4096]
    assert (snap["vt"], snap["cwe"], snap["average"], snap["n"], snap["n_missing"]) == (
        "37.5",
        "75.0",
        "56.25",
        "6",
        "0",
    )
    vt_error = 50 * (0.6875 / 3) ** 0.5
    assert float(snap["vt_stderr"]) == pytest.approx(vt_error, abs=1e-9)  # a few roundings of numbers near 100
    assert float(snap["cwe_stderr"]) == pytest.approx(25, abs=1e-9)
    assert float(snap["average_stderr"]) == pytest.approx((vt_error**2 + 25**2) ** 0.5 / 2, abs=1e-9)
    assert (float(snap["ratio"]), float(table["FullKV", 4096]["ratio"])) == (0.25, 1)
    part = table["SnapKV", 8192]
    assert (part["vt"], part["cwe"], part["average"], part["average_stderr"]) == ("37.5", "", "", "")
    assert (part["n_missing"], part["cwe_n"]) == ("1", "")

    text, scores, averages = read_md(folder)
    assert scores[0] == ["method", "length", "vt", "cwe", "avg of 2", "stderr", "n", "bytes/FullKV"]
    assert scores[4] == ["SnapKV (query_head)", "4096", "37.50", "75.00", "56.25", "17.31", "6", "0.250"]
    assert scores[5] == ["SnapKV (query_head)", "8192", "37.50", "", "", "", "4", "0.250"]
    assert averages[0] == ["method", "4096", "8192"]
    assert averages[2:] == [["FullKV", "75.00", "75.00"], ["SnapKV (query_head)", "56.25", ""]]
    assert "- avg of 2: vt, cwe.\n" in text and text.strip() in capsys.readouterr().out

    data = read_json(folder)
    assert (data["tasks"], data["lengths"]) == (["vt", "cwe"], [4096, 8192])
    assert data["averages_by_length"][1] == {
        **{"run": "model_512", "method": "SnapKV"},
        "average": {"4096": 56.25, "8192": None},
    }
    assert data["rows"][3]["tasks"]["cwe"] is None and data["rows"][2]["tasks"]["vt"]["mean"] == 37.5
    for name in ("results.csv", "results.md", "results.json"):
        content = (folder / name).read_text(encoding="utf-8")
        assert "-1" not in content and "nan" not in content.lower()


def test_lengths_are_ordered_as_numbers(tmp_path):
    for length in (512, 4096, 16384):
        write(tmp_path / str(length) / "vt" / "FullKV.json", [row(0, "cat dog")])
    assert run("--results_dir", tmp_path) == 0
    assert list(read_csv(tmp_path)) == [("FullKV", 512), ("FullKV", 4096), ("FullKV", 16384)]


def test_all_and_part_by_task(tmp_path):
    for task in RULER_TASKS:
        write(tmp_path / "512" / task / "FullKV.json", [row(0, "a cat", task=task), row(1, "cat dog", task=task)])
    assert run("--results_dir", tmp_path) == 0
    full = read_csv(tmp_path)["FullKV", 512]
    assert {task: float(full[task]) for task in RULER_TASKS} == {
        task: 100 if task in ("qa_1", "qa_2") else 75 for task in RULER_TASKS
    }
    assert full["average"] == "78.85"  # (11 * 75 + 2 * 100) / 13
    _, scores, _ = read_md(tmp_path)
    assert scores[0][2:16] == [*RULER_TASKS, "avg 13"]


def test_one_lengths_folder_as_the_original_had_it(folder, monkeypatch):
    record(folder, "SnapKV", {"4096/vt": 5}, preset="paper")
    assert run("--results_dir", folder / "4096") == 0
    assert list(read_csv(folder / "4096")) == [("FullKV", 4096), ("SnapKV", 4096)]
    text, scores, _ = read_md(folder / "4096")
    assert text.startswith("## model_512/4096\n") and "- preset: paper (SnapKV)\n" in text
    assert scores[3][2] == "37.50 (4<5)"
    assert not (folder / "results.md").exists()
    monkeypatch.chdir(folder / "8192")
    assert run("--results_dir", ".") == 0
    assert list(read_csv(folder / "8192")) == [("FullKV", 8192), ("SnapKV", 8192)]


def test_a_parent_gives_a_table_a_run_and_one_for_all(folder, capsys):
    other = folder.parent / "model_128"
    write(other / "4096" / "vt" / "SnapKV.json", [row(0, "cat")], end='{"_id": "1", "pr')
    assert run("--results_dir", folder.parent) == 0
    with open(folder.parent / "results.csv", encoding="utf-8", newline="") as file:
        rows = [(r["run"], r["method"], r["length"], r["vt"], r["cwe"]) for r in csv.DictReader(file)]
    assert rows[0] == ("model_128", "SnapKV", "4096", "50.0", "") and len(rows) == 5
    _, _, averages = read_md(folder.parent)
    assert [line[:2] for line in averages[2:]] == [
        ["model_128", "SnapKV"],
        ["model_512", "FullKV"],
        ["model_512", "SnapKV (query_head)"],
    ]
    assert list(read_csv(other)) == [("SnapKV", 4096)] and len(read_csv(folder)) == 4
    out = capsys.readouterr().out
    assert "- note: model_128: 4096/vt/SnapKV.json: a torn last line is left out.\n" in out
    assert out.count("## ") == 3


def test_the_originals_files(tmp_path):
    # two rows that are alike in everything count twice
    rows = [original(0, "cat dog"), original(1, "dog"), original(1, "dog")]
    write(tmp_path / "4096" / "vt" / "pyramidkv.json", rows)
    write(tmp_path / "4096" / "vt" / "metrics.json", [{"vt": 1}])
    assert run("--results_dir", tmp_path) == 0
    table = read_csv(tmp_path)
    assert list(table) == [("PyramidKV", 4096)]
    assert (table["PyramidKV", 4096]["vt"], table["PyramidKV", 4096]["n"]) == ("66.67", "3")
    assert table["PyramidKV", 4096]["granularity"] == "" and "No run record" in read_md(tmp_path)[0]
    write(tmp_path / "4096" / "vt" / "pyramidkv.json", rows, end='{"prompt": "p')
    assert run("--results_dir", tmp_path) == 0
    assert read_csv(tmp_path)["PyramidKV", 4096]["n"] == "3" and "a torn last line" in read_md(tmp_path)[0]


def test_errors_are_left_out_or_zero_and_cells_are_marked(tmp_path):
    failed = {"_id": "2", "dataset": "vt", "error": "out of memory"}
    write(tmp_path / "4096" / "vt" / "H2O.json", [row(0, "cat dog"), row(1, "dog"), failed])
    assert run("--results_dir", tmp_path) == 0
    h2o = read_csv(tmp_path)["H2O", 4096]
    assert (h2o["vt"], h2o["average"], h2o["n"], h2o["n_error"], h2o["incomplete"]) == (
        *("75.0", "75.0", "2", "1"),
        "vt:2<3",
    )
    text, scores, averages = read_md(tmp_path)
    assert scores[2][2:4] == ["75.00 (2<3)", "75.00*"] and averages[2] == ["H2O", "75.00*"]
    assert "- note: 4096/vt/H2O.json: 1 examples failed and are left out.\n" in text and "- n<N:" in text
    assert run("--results_dir", tmp_path, "--errors_as_zero") == 0
    h2o = read_csv(tmp_path)["H2O", 4096]
    assert (h2o["vt"], h2o["n"], h2o["incomplete"]) == ("50.0", "3", "")


def test_records_say_how_and_how_many(folder):
    record(
        folder, "FullKV", {"8192/cwe": 3}, preset="factory", ruler_protocol="official", kv_cache_granularity="kv_head"
    )
    record(folder, "snapkv", {"4096/vt": 4}, ["a recalled beta"], preset="paper", ruler_protocol="official")
    assert run("--results_dir", folder) == 0
    text, scores, averages = read_md(folder)
    assert "- preset: factory (FullKV); paper (SnapKV)\n- protocol: official\n" in text
    assert "- note: SnapKV: a recalled beta\n" in text and "No run record" not in text
    assert [line[3] for line in scores[2:4]] == ["50.00", "50.00 (2<3)"]
    assert averages[2] == ["FullKV", "75.00", "75.00*"]


def test_a_folder_of_shards_alone_is_refused(tmp_path, capsys):
    write(tmp_path / "tiny_512" / "4096" / "fwe" / "FullKV.shard0of2.json", [row(0, "cat")])
    for folder in (tmp_path, tmp_path / "tiny_512", tmp_path / "tiny_512" / "4096"):
        assert run("--results_dir", folder) == 2
        assert "there are results of shards alone; join them first" in capsys.readouterr().err


def test_empty_files_shards_and_strange_names_are_notes(folder, capsys):
    write(folder / "4096" / "fwe" / "FullKV.json", [])
    write(folder / "4096" / "fwe" / "FullKV.shard0of2.json", [row(0, "cat")])
    write(folder / "4096" / "hotpotqa" / "FullKV.json", [row(0, "cat")])
    write(folder / "16k" / "vt" / "FullKV.json", [row(0, "cat")])
    write(folder / "04096" / "vt" / "FullKV.json", [row(0, "cat")])
    write(folder / "8192" / "vt" / "FullKV.json", [row(0, "cat dog", score=0.5), row(1, "dog", task="cwe", score=0.5)])
    assert run("--results_dir", folder) == 0
    out = capsys.readouterr().out
    for told in (
        "4096/fwe/FullKV.json: the file is empty.",
        "4096/fwe/ holds shard files that must be merged first (FullKV.shard0of2.json); ignored.",
        "4096/hotpotqa/ is ignored: it is not named after a RULER task.",
        "16k/ is ignored: it is not named after a length in tokens.",
        "04096/ is ignored: it is not named after a length in tokens.",
        "8192/vt/FullKV.json: the stored score of 1 rows is not what rescoring gives (first: 0)",
        "8192/vt/FullKV.json: 1 rows name another dataset; all are scored as vt.",
    ):
        assert f"- note: {told}" in out
    table = read_csv(folder)
    assert (table["FullKV", 4096]["fwe"], table["FullKV", 4096]["average"]) == ("", "")
    assert len(table) == 4


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: p / "nowhere", "nowhere is not a folder"),
        (lambda p: p, "holds no result files"),
        (lambda p: write(p / "4096" / "vt" / "S.json", [row(0, "a")]).parent, "give the folder above it"),
        (lambda p: write(p / "4k" / "vt" / "S.json", [row(0, "a")]).parent.parent, "4k is not a length in tokens"),
        (
            lambda p: write(p / "8" / "vt" / "S.json", [row(0, "a")], end='{"_id\n{"_id": "b"}\n').parents[2],
            "S.json line 2 is broken",
        ),
        (
            lambda p: write(p / "8" / "vt" / "S.json", [original(0, "a")], end='{"pr\n{"pred": "b"}\n').parents[2],
            "S.json line 2 is broken .*repair",
        ),
        (
            lambda p: write(p / "8" / "vt" / "S.json", [original(0, "a"), row(0, "a")]).parents[2],
            "S.json line 1 is no result row",
        ),
        (lambda p: write(p / "8" / "vt" / "S.json", [{"_id": "a"}]).parents[2], "S.json line 1 needs the fields pred"),
        (
            lambda p: write(p / "8" / "vt" / "S.json", [row(7, "a", [])]).parents[2],
            "S.json, _id 7: vt has no reference",
        ),
        (
            lambda p: [write(p / "8" / "vt" / n, [row(0, "a")]) for n in ("h2o.json", "H2O.json")][0].parents[2],
            "both stand for H2O on 8/vt",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, capsys, make, message):
    error = refused(capsys, eval_ruler.main, ["--results_dir", str(make(tmp_path))])
    assert re.search(message, error), error
    assert not list(tmp_path.rglob("results.*"))


def test_runs_without_torch(folder):
    score_without_torch("eval_ruler.py", folder)
    assert read_csv(folder)["SnapKV", 4096]["average"] == "56.25"
