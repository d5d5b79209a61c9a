"""Reading, finding and choosing records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvfactory.data import longbench
from kvfactory.data.longbench import FIELDS, choose_examples, locate_data, read_dataset, sample_dir, shard
from kvfactory.data.tasks import TASKS


def write(tmp_path, *lines: bytes, end: bytes = b"\n"):
    path = tmp_path / "hotpotqa.jsonl"
    path.write_bytes(end.join(lines) + end)
    return path


def line(record, **changes) -> bytes:
    return json.dumps({**record, **changes}, ensure_ascii=False).encode()


def test_odd_but_valid_files_are_read(tmp_path, record):
    text = "one\u2028two\x0bthree\x85four"  # all of them line ends for str.splitlines, none for JSON Lines
    raw = json.dumps({**record, "context": text}, ensure_ascii=False).replace("\\u000b", "\x0b")
    assert "\u2028" in raw and "\x0b" in raw
    rows = [raw.encode(), b"", line(record, _id="a2", answers=[], extra=1), b"  ", line(record, _id="a3", length=0)]
    path = write(tmp_path, b"\xef\xbb\xbf" + rows[0], *rows[1:], end=b"\r\n")
    got = read_dataset(path, "hotpotqa")
    assert [r["_id"] for r in got] == ["a1", "a2", "a3"]
    assert got[0]["context"] == text
    assert got[1]["answers"] == []
    assert set(got[1]) == set(FIELDS)


def test_no_newline_at_the_end_and_escaped_lone_surrogates(tmp_path, record):
    path = tmp_path / "x.jsonl"
    path.write_bytes(line(record) + b"\n" + json.dumps({**record, "_id": "b", "input": "\ud800"}).encode())
    assert read_dataset(path, "hotpotqa")[1]["input"] == "\ud800"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"input": "x"', "broken JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1, 2]", "a JSON object is expected, this is a list of int"),
        (b'"text"', "this is a string"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path, record, bad, says):
    path = write(tmp_path, line(record), b"", bad)
    with pytest.raises(ValueError, match=says) as error:
        read_dataset(path, "hotpotqa")
    assert f"{path}, line 3: " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", list(FIELDS))
def test_a_missing_field_is_named(tmp_path, record, field):
    del record[field]
    with pytest.raises(ValueError, match=f"line 1: missing {field};"):
        read_dataset(write(tmp_path, line(record)), "hotpotqa")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("input", None, "must be a string, this is null"),
        ("context", ["x"], "must be a string, this is a list of str"),
        ("answers", "Ann", "must be a list of strings, this is a string"),
        ("answers", None, "must be a list of strings, this is null"),
        ("answers", ["a", 1], "this is a list of int and str"),
        ("length", "9", "must be an integer, this is a string"),
        ("length", 9.5, "a number with a fraction"),
        ("length", True, "must be an integer, this is true"),
        ("all_classes", "trec", "a list of strings or null, this is a string"),
        ("all_classes", [1], "a list of int"),
        ("_id", 7, "must be a string, this is an integer"),
        ("language", {}, "this is an object"),
    ],
)
def test_a_wrong_type_is_named(tmp_path, record, field, value, says):
    with pytest.raises(ValueError, match=f"line 2: {field} .*{says}"):
        read_dataset(write(tmp_path, line(record), line(record, **{"_id": "b", field: value})), "hotpotqa")


def test_duplicate_id_empty_file_and_unreadable_path(tmp_path, record):
    with pytest.raises(ValueError, match="line 3: _id 'a1' is already used on line 1"):
        read_dataset(write(tmp_path, line(record), line(record, _id="b"), line(record)), "hotpotqa")
    with pytest.raises(ValueError, match="no records; hotpotqa"):
        read_dataset(write(tmp_path, b"", b" "), "hotpotqa")
    with pytest.raises(ValueError, match="cannot be read"):
        read_dataset(tmp_path, "hotpotqa")
    with pytest.raises(ValueError, match="cannot be read"):
        read_dataset(tmp_path / "none.jsonl", "hotpotqa")


def test_the_last_line_is_checked_too(tmp_path, record):
    rows = [line(record, _id=str(i)) for i in range(50)]
    with pytest.raises(ValueError, match="line 51: broken JSON"):
        read_dataset(write(tmp_path, *rows, b"{"), "hotpotqa")


def test_data_dir_is_the_only_place_when_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    own, default, cache = tmp_path / "own", tmp_path / "data" / "LongBench", tmp_path / "cache" / "LongBench"
    for folder, names in ((own, ["lcc"]), (default, ["lcc", "qasper_e"]), (cache, ["lcc", "qasper_e", "vcsum"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.jsonl").write_text("{}")
    assert locate_data(own, ["LCC"]) == {"lcc": own / "lcc.jsonl"}
    with pytest.raises(ValueError, match="vcsum.jsonl is not in .*own; run `python -m kvfactory.data download`"):
        locate_data(str(own), ["vcsum"])
    found = locate_data(None, ["lcc", "qasper_e", "vcsum"])
    assert [found[n].resolve() for n in found] == [
        default / "lcc.jsonl",
        default / "qasper_e.jsonl",
        cache / "vcsum.jsonl",
    ]
    with pytest.raises(ValueError) as error:
        locate_data(None, ["trec"])
    for part in ("trec", str(cache), "data/LongBench", "python -m kvfactory.data download", "--data_dir"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="--data_dir .*nowhere is not a folder"):
        locate_data(tmp_path / "nowhere", ["lcc"])
    with pytest.raises(ValueError, match="Did you mean qasper"):
        locate_data(None, ["quasper"])


def test_choosing_keeps_data_order_and_needs_no_history():
    rows = list(range(37))
    assert choose_examples(rows, None, "topk", 0, "lcc") == rows
    assert choose_examples(rows, 5, "topk", 0, "lcc") == rows[:5]
    assert choose_examples(rows, 99, "random", 0, "lcc") == rows
    picked = choose_examples(rows, 7, "random", 42, "lcc")
    assert picked == [9, 11, 14, 16, 17, 29, 32]  # fixed for good: another choice would break resumed runs
    assert picked == sorted(set(picked))
    assert choose_examples(rows, 7, "random", 42, "qasper") != picked
    assert choose_examples(rows, 7, "random", 43, "lcc") != picked
    with pytest.raises(ValueError, match="--max_num_examples 0"):
        choose_examples(rows, 0, "topk", 0, "lcc")
    with pytest.raises(ValueError, match="--sample_method 'best' .*topk, random"):
        choose_examples(rows, 3, "best", 0, "lcc")


def test_shards_are_disjoint_and_complete():
    rows = list(range(11))
    parts = [shard(rows, 3, i) for i in range(3)]
    assert parts[1] == [1, 4, 7, 10]
    assert sorted(sum(parts, [])) == rows
    for bad in ((0, 0), (3, 3), (3, -1)):
        with pytest.raises(ValueError, match="--num_shards"):
            shard(rows, *bad)


def test_sample_dir_is_found_in_a_checkout_and_refused_elsewhere(tmp_path, monkeypatch):
    fake = tmp_path / "kvfactory" / "data" / "longbench.py"
    monkeypatch.setattr(longbench, "__file__", str(fake))
    with pytest.raises(ValueError, match="source checkout"):
        sample_dir()
    (tmp_path / "data" / "sample").mkdir(parents=True)
    (tmp_path / "data" / "sample" / "lcc.jsonl").write_text("{}")
    assert sample_dir() == tmp_path / "data" / "sample"


def test_reading_data_needs_neither_torch_nor_transformers():
    modules = [f"kvfactory.data.{name}" for name in ("longbench", "prompts", "download", "templates", "__main__")]
    heavy = ("torch", "transformers", "huggingface_hub")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_all_real_records_are_read(data_dir):
    folder = data_dir / "LongBench"
    files = locate_data(folder, TASKS)
    records = {name: read_dataset(path, name) for name, path in files.items()}
    assert sum(map(len, records.values())) == 163
    assert all(r["dataset"].removesuffix("_e") == name for name, rows in records.items() for r in rows)
