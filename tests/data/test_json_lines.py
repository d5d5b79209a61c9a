"""JSON Lines of data sets; what the readers of LongBench and RULER add is tested with them."""

from __future__ import annotations

import re

import pytest

from kvfactory.data.json_lines import kind, read_objects


def write(folder, content: bytes):
    path = folder / "a.jsonl"
    path.write_bytes(content)
    return path


def test_lines_are_numbered_as_in_the_file(tmp_path):
    path = write(tmp_path, b'\xef\xbb\xbf{"a": "x\xe2\x80\xa8y"}\r\n\n  \n{"a": "\x0b"}')
    assert list(read_objects(path, "vt")) == [(1, {"a": "x\u2028y"}), (4, {"a": "\x0b"})]


@pytest.mark.parametrize(
    "content, told",
    [
        (b'{"a": 1}\n{"a":', "line 2: broken JSON"),
        (b'{"a": 1}\n\n{"a": "\xff"}', "line 3: not UTF-8 text (byte 8 of the line"),
        (b'{"a": 1}\n[1, "b"]', "line 2: a JSON object is expected, this is a list of int and str."),
        (b"[" * 100_000, "line 1: JSON that cannot be read"),
        (b'{"a": ' + b"1" * 5000 + b"}", "line 1: JSON that cannot be read"),
        (b" \n\n", "no records; vt needs at least one JSON object, one a line."),
    ],
)
def test_the_first_bad_line_is_named(tmp_path, content, told):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(told)}") as caught:
        list(read_objects(path, "vt"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="the vt data cannot be read"):
        list(read_objects(tmp_path / "none.jsonl", "vt"))


def test_kinds_in_words():
    values = [None, True, [], ["a", 1], {}, "a", 1, 1.5]
    assert [kind(value) for value in values] == [
        *("null", "true", "a list of nothing", "a list of int and str"),
        *("an object", "a string", "an integer", "a number with a fraction"),
    ]
