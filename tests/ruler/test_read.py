"""RULER files: both layouts, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from kvfactory.ruler.read import locate_ruler, read_ruler
from kvfactory.ruler.tasks import RULER_TASKS


def old(index=0, **more):
    return {"index": index, "input": f"text {index} The answer is:", "outputs": ["7"], "length": 500, **more}


def current(index=0, **more):
    extra = {"length_w_model_temp": 510, "token_position_answer": 12}
    return {
        "index": index,
        "input": "text",
        "outputs": ["7"],
        "length": 500,
        "answer_prefix": " The is",
        **extra,
        **more,
    }


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "vt.jsonl"
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"\n".join(texts))
        return path

    return write


def test_the_older_layout(file):
    records = read_ruler(file(old(3), old(1, others={"a": 1})), "VT")
    assert records[0] == {
        **{"_id": "3", "index": 3, "input": "text 3 The answer is:", "answer_prefix": "", "outputs": ["7"]},
        "length": 500,
    }
    assert [r["_id"] for r in records] == ["3", "1"] and set(records[1]) == set(records[0])


def test_the_current_layout(file):
    records = read_ruler(file(current(0), current(1, answer_prefix="", length=None)), "vt")
    assert list(records[0]) == ["_id", "index", "input", "answer_prefix", "outputs", "length"]
    assert [(r["input"], r["answer_prefix"], r["length"]) for r in records] == [
        ("text", " The is", 500),
        ("text", "", None),
    ]


def test_what_a_file_may_have(file):
    separators = json.dumps(old(1, input="a\u2028b\x0bc"), ensure_ascii=False).encode()
    lines = [b"\xef\xbb\xbf" + json.dumps(old(0)).encode() + b"\r", b"", separators, b"  "]
    records = read_ruler(file(*lines), "vt")
    assert [r["input"] for r in records] == ["text 0 The answer is:", "a\u2028b\x0bc"]
    del (short := old())["length"]
    assert read_ruler(file(short), "vt")[0]["length"] is None


@pytest.mark.parametrize(
    "lines, told",
    [
        ([old(0), {"index": 1, "input": "a"}], "line 2: missing outputs"),
        ([{"outputs": ["a"], "input": "a"}], "line 1: missing index"),
        ([{"outputs": ["a"], "index": 1}], "line 1: missing input"),
        ([old(outputs=[])], r"line 1: outputs is \[\]"),
        ([old(outputs=["a", " "])], "line 1: outputs is .*blank"),
        ([old(outputs="a")], 'line 1: outputs must be a list of strings, this is "a"'),
        ([old(outputs=[7])], "line 1: outputs must be a list of strings"),
        ([old(index="0")], "line 1: index must be an integer"),
        ([old(index=True)], "line 1: index must be an integer, this is true"),
        ([old(index=None)], "line 1: index must be an integer, this is null"),
        ([old(input=1)], "line 1: input must be a string"),
        ([current(answer_prefix=None)], "line 1: answer_prefix must be a string, this is null"),
        ([old(length=1.5)], "line 1: length must be an integer or null"),
        ([old(4), old(5), old(4)], "line 3: index 4 is already used on line 1"),
        ([old(0), b"", current(1)], "line 3: a record with answer_prefix, but line 1 is one without"),
        ([current(0), old(1)], "line 2: a record without answer_prefix, but line 1 is one with answer_prefix"),
        ([old(0), b'{"index": 1,'], "line 2: broken JSON"),
        ([old(0), b"\xff"], "line 2: not UTF-8"),
        ([b"[1]"], "line 1: a JSON object is expected"),
        ([b"[" * 100_000], "line 1: JSON that cannot be read"),
        ([b"  ", b""], "no records; vt needs"),
        ([], "no records; vt needs"),
    ],
)
def test_bad_files_are_named_with_their_line(file, lines, told):
    path = file(*lines)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + told) as caught:
        read_ruler(path, "vt")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_missing_file_and_an_unknown_task(file, tmp_path):
    with pytest.raises(ValueError, match="none.jsonl: the vt data cannot be read"):
        read_ruler(tmp_path / "none.jsonl", "vt")
    with pytest.raises(ValueError, match="unknown RULER task 'vtt'"):
        read_ruler(file(old()), "vtt")


@pytest.fixture
def data(tmp_path):
    for length in (16384, 4096):
        (tmp_path / str(length)).mkdir()
        for task in ("vt", "qa_1", "cwe"):
            (tmp_path / str(length) / f"{task}.jsonl").write_text("")
    (tmp_path / "config").mkdir()
    return tmp_path


def test_locate(data):
    found = locate_ruler(str(data), [16384, 4096, 16384], ["QA_1", "vt", "qa_1"])
    assert list(found) == [(16384, "qa_1"), (16384, "vt"), (4096, "qa_1"), (4096, "vt")]
    assert found[4096, "vt"] == data / "4096" / "vt.jsonl"
    assert list(locate_ruler(data, None, ["cwe"])) == [(4096, "cwe"), (16384, "cwe")]


def test_locate_names_what_is_missing_and_how_to_make_it(data):
    for arguments, told in [
        ((data, [4096, 8192], ["vt"]), "no RULER data for 8192/vt.jsonl in"),
        ((data, [4096], RULER_TASKS), "for 4096/niah_single_1.jsonl, .*, 4096/niah_single_3.jsonl and 7 more in"),
        ((data / "none", [4096], ["vt"]), "none is not a folder"),
        ((data / "config", None, ["vt"]), "config has no folder named after a length"),
    ]:
        with pytest.raises(ValueError, match=told) as caught:
            locate_ruler(*arguments)
        assert "`python -m kvfactory.ruler`" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown RULER task 'niah'"):
        locate_ruler(data, [4096], ["niah"])
