"""Markdown tables that line up, and a result file in numbers."""

from __future__ import annotations

import json
import math

import pytest

from kvfactory.reports.tables import format_bytes, format_number, format_table, summarise_rows


def test_columns_line_up_and_numbers_go_right():
    table = format_table(["method", "score"], [["FullKV", 1.5], ["Snap|KV", "12.25 (3<5)"], ["中文", None]])
    assert table.split("\n") == [
        "| method   |       score |",
        "| -------- | ----------: |",
        "| FullKV   |         1.5 |",
        "| Snap\\|KV | 12.25 (3<5) |",
        "| 中文     |             |",
    ]


def test_alignment_on_request():
    lines = format_table(["a", "b", "c"], [["1", "2", "3"]], align="lrc").split("\n")
    assert lines[1:] == ["| --- | --: | :-: |", "| 1   |   2 |  3  |"]


def test_no_rows_is_a_table_too():
    assert format_table(["a"], []).split("\n") == ["| a   |", "| --- |"]


def test_a_line_break_in_a_cell_stays_in_its_row():
    assert format_table(["a"], [["x\ny"]]).split("\n")[2] == "| x y |"


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match="row 2 .* has 1 cells, the header has 2"):
        format_table(["a", "b"], [[1, 2], [1]])
    with pytest.raises(ValueError, match="align 'lx'"):
        format_table(["a", "b"], [], align="lx")


def test_numbers_and_bytes():
    assert (format_number(None), format_number(2.345, 1)) == ("", "2.3")
    shown = [format_bytes(v) for v in (None, 0, 1023, 1024, 1536.0, 5 * 1024**3, 3000 * 1024**4)]
    assert shown == ["", "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "3000.0 TiB"]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def is_cat(row):
    return float(row["pred"] == "cat")


def test_summary_of_a_file(tmp_path):
    base = {"answers": ["cat"], "length": 10, "dataset": "hotpotqa", "all_classes": None}
    full = {"bytes_full": 1000, "prefill_s": 1.0}
    rows = [
        {**base, **full, "_id": "1", "pred": "cat", "bytes_end": 100, "kept_tokens": {"mean": 4}, "decode_s": 0.5},
        {**base, **full, "_id": "2", "pred": "dog", "bytes_end": 300, "kept_tokens": {"mean": 8}, "decode_s": 1.5},
        {**base, **full, "_id": "3", "pred": "cat", "bytes_end": 200, "kept_tokens": {"mean": 6}, "decode_s": None},
        {"_id": "4", "dataset": "hotpotqa", "error": "out of memory"},
    ]
    summary = summarise_rows(write(tmp_path / "hotpotqa" / "snapkv+kv_head.json", rows), "hotpotqa", is_cat)
    assert summary.pop("score") == pytest.approx(200 / 3, abs=1e-12)
    # sample variance of (1, 0, 1) is 1/3, so the standard error is sqrt(1/9)
    assert summary.pop("stderr") == pytest.approx(100 / 3, abs=1e-12)
    assert summary == {
        "method": "SnapKV+kv_head",
        "dataset": "hotpotqa",
        "n": 3,
        "n_error": 1,
        "kept": 6.0,
        "bytes_end": 200.0,
        "bytes_full": 1000.0,
        "ratio": 0.2,
        "seconds": 2.0,
    }


def test_summary_without_rows_or_costs(tmp_path):
    summary = summarise_rows(write(tmp_path / "hotpotqa" / "Foo.json", []), "hotpotqa", is_cat)
    assert summary["method"] == "Foo" and summary["n"] == 0
    assert all(summary[k] is None for k in ("score", "stderr", "kept", "bytes_end", "bytes_full", "ratio", "seconds"))
    row = {"_id": "1", "pred": "cat", "answers": ["cat"], "kept_tokens": {"mean": math.inf}, "bytes_end": True}
    path = write(tmp_path / "x" / "Foo.json", [{**row, "kept_tokens": {}}])
    assert summarise_rows(path, "x", is_cat)["kept"] is None
    with pytest.raises(ValueError, match="not a result file"):
        summarise_rows(tmp_path / "hotpotqa" / "Bar.json", "hotpotqa", is_cat)
