"""Result files: appending, killing, resuming, finishing."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time

import pytest

from kvfactory.reports.files import FileInUse
from kvfactory.reports.records import ResultFile, effective_lines, encode_row, read_lines

# Writes rows 0..N-1 of a fixed set, 7 bytes at a time (a short write is legal, and rows hold characters of 1 to 4
# bytes), and kills itself with SIGKILL once `argv[2]` bytes of rows are out; argv[3] is a pause per piece in seconds.
CHILD = """
import os, signal, sys, time
from kvfactory.reports.records import ResultFile

path, left, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
write = os.write

def slow(fd, data):
    global left
    if not (os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path))):
        return write(fd, data)
    n = write(fd, bytes(data[: min(7, left) if left > 0 else 7]))
    left -= n
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
    return n

os.write = slow
order = [f"id{i:02d}" for i in range(40)]
with ResultFile(path, order) as results:
    print("open", flush=True)
    for i, name in enumerate(order):
        if name not in results.done:
            extra = "\\ud800" if i % 9 == 4 else ""
            results.append({"_id": name, "pred": "é漢😀\\u2028" * (i % 5) + "x" * (i * 3) + extra, "score": i / 40})
"""


def child(path, left=-1, pause=0.0):
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(left), str(pause)], stdout=subprocess.PIPE)


def finish(process):
    process.communicate(timeout=30)
    return process.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Bytes of an uninterrupted run of CHILD."""
    path = tmp_path_factory.mktemp("whole") / "a.json"
    assert finish(child(path)) == 0
    return path.read_bytes()


def test_twenty_kills_inside_writes_then_resume(tmp_path, whole):
    """Kills after a random number of bytes, so nearly all of them inside a line, some inside a character."""
    path, chance, torn = tmp_path / "a.json", random.Random(0), 0
    for _ in range(20):
        assert finish(child(path, left=chance.randint(1, len(whole) // 12))) == -9
        torn += not path.read_bytes().endswith(b"\n")
    assert torn >= 15  # with the seed above; the point of the test
    assert finish(child(path)) == 0
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_kills_from_outside_at_random_moments_then_resume(tmp_path, whole):
    path, chance = tmp_path / "a.json", random.Random(1)
    for _ in range(5):
        process = child(path, pause=0.0005)
        process.stdout.readline()
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        finish(process)
    assert finish(child(path)) == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize("after", [False, True])
def test_kill_while_the_file_is_put_into_order(tmp_path, after):
    path = tmp_path / "a.json"
    code = f"""
import os, signal, sys
from kvfactory.reports.records import ResultFile
replace = os.replace
def dies(*a):
    {"replace(*a)" if after else "pass"}
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = dies
with ResultFile(sys.argv[1], ["a", "b", "c"]) as results:
    for name in "cab":
        results.append({{"_id": name}})
"""
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    with ResultFile(path, ["a", "b", "c"]) as results:
        assert results.complete
    assert path.read_bytes() == b'{"_id": "a"}\n{"_id": "b"}\n{"_id": "c"}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_two_processes_on_one_file(tmp_path):
    path = tmp_path / "a.json"
    with ResultFile(path, ["a"]) as results:
        second = subprocess.run([sys.executable, "-c", CHILD, str(path), "-1", "0"], capture_output=True, text=True)
        assert second.returncode != 0
        assert f"FileInUse: {path} is being written by process {os.getpid()} " in second.stderr
        results.append({"_id": "a"})
    with ResultFile(path, ["a"]) as first, pytest.raises(FileInUse):
        ResultFile(path, ["a"])
    assert first.complete


def test_opening_writes_nothing(tmp_path):
    path = tmp_path / "model" / "set" / "a.json"
    ResultFile(path, ["a"]).close()
    assert list(tmp_path.iterdir()) == []


def test_rows_are_whole_in_the_file_when_append_returns(tmp_path):
    path = tmp_path / "a.json"
    with ResultFile(path, ["a", "b"]) as results:
        for name in "ab":
            row = {"_id": name, "pred": "é\u2028\n"}
            results.append(row)
            assert path.read_bytes().endswith(b"\n")
            assert json.loads(path.read_bytes().splitlines()[-1]) == row
            assert name in results.done
        assert results.rows() == [{"_id": i, "pred": "é\u2028\n"} for i in "ab"]


def test_torn_last_line_is_dropped_whatever_its_length(tmp_path):
    path, order = tmp_path / "a.json", ["a", "b", "c"]
    lines = [encode_row({"_id": i, "pred": "é😀"}) for i in order]
    for cut in range(len(lines[1])):
        path.write_bytes(lines[0] + lines[1][:cut])
        with ResultFile(path, order) as results:
            whole = cut == len(lines[1]) - 1  # only the newline is missing: the row is there
            assert results.done == ({"a", "b"} if whole else {"a"})
            assert len(results.notices) == (0 if whole or cut == 0 else 1)
            for i, name in enumerate(order):
                if name not in results.done:
                    results.append(json.loads(lines[i]))
        assert path.read_bytes() == b"".join(lines)


def test_torn_tails_of_a_power_cut(tmp_path):
    path, good = tmp_path / "a.json", b'{"_id": "a"}\n'
    for tail in (b"\0" * 50, b'{"_id": "b", "pre\n', b'{"_id": "b", "x": NaN}\n', b"\xff\n\n"):
        path.write_bytes(good + tail)
        with ResultFile(path, ["a", "b"]) as results:
            assert results.done == {"a"} and len(results.notices) == 1
        assert path.read_bytes() == good


@pytest.mark.parametrize(
    "content, number, words",
    [
        (b'{"_id": "a"}\n{"_id": "b", "pr\n{"_id": "c"}\n', 2, "is broken"),
        (b'\n{"_id": "a", "x": NaN}\n{"_id": "c"}\n', 2, "NaN"),
        (b'{"_id": "a"}\n\xff\xfe\n{"_id": "c"}\n', 2, "is broken"),
        (b'{"_id": "a"}\n[1]\n{"_id": "c"}\n', 2, "'_id'"),
        (b'{"_id": "a"}\n{"_id": 7}\n', 2, "'_id'"),
        (b'{"_id": "a"}\n{"pred": ""}\n', 2, "'_id'"),
        (b'{"_id": "a"}\n{"_id": "else"}\n', 2, "'else'"),
    ],
)
def test_what_no_kill_leaves_is_refused_with_file_and_line(tmp_path, content, number, words):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        ResultFile(path, ["a", "b", "c"])
    text = str(error.value)
    assert f"{path} line {number} " in text and words in text and "--overwrite" in text and "\n" not in text
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]  # the lock is given up
    with ResultFile(path, ["a"], overwrite=True) as results:
        assert results.done == set() and results.rows() == []
        results.append({"_id": "a"})
    assert path.read_bytes() == b'{"_id": "a"}\n'


def test_unreadable_file(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ValueError, match="cannot read the results in .*a.json"):
        ResultFile(tmp_path / "a.json", ["a"])


def test_failures_are_tried_again_and_replaced(tmp_path):
    path, order = tmp_path / "a.json", ["a", "b", "c"]
    with ResultFile(path, order) as results:
        results.append({"_id": "a"})
        results.append({"_id": "b", "error": "out of memory"})
        results.append({"_id": "c", "error": None})  # a null error is no failure
        assert results.failed == {"b"} and results.done == {"a", "c"} and not results.complete
    with ResultFile(path, order) as results:
        assert results.failed == {"b"} and results.done == {"a", "c"}
        results.append({"_id": "b", "error": "again"})
        assert results.failed == {"b"}
    assert [json.loads(line).get("error") for line in path.read_text().splitlines()] == [None, "again", None]
    with ResultFile(path, order) as results:
        results.append({"_id": "b", "pred": "x"})
        assert results.failed == set() and results.complete
        assert results.rows()[1] == {"_id": "b", "pred": "x"}
    assert path.read_bytes() == b'{"_id": "a"}\n{"_id": "b", "pred": "x"}\n{"_id": "c", "error": null}\n'


def test_first_result_of_repeated_ones_wins():
    def line(number, **row):
        from kvfactory.reports.records import Line

        return Line(number, b"", row)

    lines = [line(1, _id="a", error="x"), line(2, _id="a", n=2), line(3, _id="a", n=3), line(4, _id="a", error="y")]
    assert effective_lines(lines)["a"].number == 2
    lines = [line(1, _id="a", error="x"), line(2, _id="a", error="y")]
    assert effective_lines(lines)["a"].number == 2


def test_repeated_results_are_dropped_and_said(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"_id": "a", "n": 1}\n{"_id": "a", "n": 2}\n')
    with ResultFile(path, ["a"]) as results:
        assert "1 repeated" in results.notices[0]
    assert path.read_bytes() == b'{"_id": "a", "n": 1}\n'


def test_any_order_of_rows_gives_the_same_file(tmp_path):
    order = [str(i) for i in range(12)]
    contents = set()
    for seed in range(5):
        path = tmp_path / f"{seed}.json"
        mixed = random.Random(seed).sample(order, len(order))
        for part in (mixed[:5], mixed[5:]):
            with ResultFile(path, order) as results:
                for name in part:
                    results.append({"_id": name})
        contents.add(path.read_bytes())
    assert contents == {b"".join(encode_row({"_id": i}) for i in order)}


def test_a_finished_file_is_not_rewritten(tmp_path):
    path = tmp_path / "a.json"
    with ResultFile(path, ["a"]) as results:
        results.append({"_id": "a"})
    before = path.stat()
    ResultFile(path, ["a"]).close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_overwrite_keeps_the_old_file_until_discard(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"_id": "a", "n": 1}\n')
    with ResultFile(path, ["a"], overwrite=True) as results:
        assert results.done == set()
    assert path.exists()
    with ResultFile(path, ["a"], overwrite=True) as results:
        results.discard()
        assert not path.exists()
        results.append({"_id": "a", "n": 2})
        results.discard()  # the new rows are not the old file
    assert path.read_bytes() == b'{"_id": "a", "n": 2}\n'


def test_repeated_id_in_the_data(tmp_path):
    with pytest.raises(ValueError, match="'b' occurs twice"):
        ResultFile(tmp_path / "a.json", ["a", "b", "b"])


def test_surrogates_and_separators_round_trip(tmp_path):
    texts = ["\ud800", "a\u2028b\u2029\x85\r\n", "\udfff😀é", ""]
    rows = [{"_id": str(i), "pred": text} for i, text in enumerate(texts)]
    path = tmp_path / "a.json"
    with ResultFile(path, [r["_id"] for r in rows]) as results:
        for row in rows:
            results.append(row)
    assert [line.row for line in read_lines(path)[0]] == rows
    assert "b\u2029".encode() in path.read_bytes() and path.read_bytes().count(b"\n") == 4


def test_floats_that_are_not_finite_are_refused_by_field(tmp_path):
    path = tmp_path / "a.json"
    with ResultFile(path, ["a"]) as results:
        with pytest.raises(ValueError, match="row 'a': field 'decode_s'"):
            results.append({"_id": "a", "score": 1.0, "decode_s": float("nan")})
        assert results.done == set()
        results.append({"_id": "a", "decode_s": None})
    assert path.read_bytes() == b'{"_id": "a", "decode_s": null}\n'


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way_is_taken_back(tmp_path, monkeypatch, error):
    path, real = tmp_path / "a.json", os.write
    with ResultFile(path, ["a", "b"]) as results:
        results.append({"_id": "a"})
        calls = []

        def full(fd, data):
            calls.append(data)
            if len(calls) > 1:
                raise error
            return real(fd, bytes(data[:5]))

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(type(error), match=str(path) if isinstance(error, OSError) else None):
                results.append({"_id": "b"})
        assert path.read_bytes() == b'{"_id": "a"}\n' and results.done == {"a"}
        results.append({"_id": "b"})
    assert path.read_bytes() == b'{"_id": "a"}\n{"_id": "b"}\n'
