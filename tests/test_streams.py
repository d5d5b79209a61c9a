"""Commands whose reader goes early, as `head -1` does: no traceback, their own exit code, all their files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import make_record, write_records

ROOT = Path(__file__).resolve().parents[1]

TABLE = """
import sys, time
from kvfactory.streams import outlive_readers
outlive_readers()
print("first", flush=True)
time.sleep(0.3)  # the reader is gone by now
for number in range(20_000):  # more than a pipe holds
    print("line", number)
print("told", file=sys.stderr)
sys.exit(3)
"""


def head(*command, lines=1, merged=False):
    """(the first lines, standard error, exit code) of a command whose output is closed after so many lines."""
    error = subprocess.STDOUT if merged else subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=error, text=True, cwd=ROOT
    )
    found = [process.stdout.readline() for _ in range(lines)]
    process.stdout.close()
    told = "" if merged else process.stderr.read()
    return found, told, process.wait(timeout=120)


def test_a_command_goes_on_and_ends_with_its_own_exit_code():
    assert head("-c", TABLE) == (["first\n"], "told\n", 3)
    assert head("-c", TABLE, merged=True) == (["first\n"], "", 3)


def test_a_reader_that_stays_gets_everything():
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and done.stderr == "told\n"
    assert done.stdout.splitlines() == ["first", *(f"line {number}" for number in range(20_000))]


def test_streams_keep_how_they_were_opened():
    code = """
import sys
from kvfactory.streams import outlive_readers
names = ("encoding", "errors", "line_buffering", "write_through")
ways = [[getattr(stream, name) for name in names] + [stream.isatty()] for stream in (sys.stdout, sys.stderr)]
outlive_readers()
assert ways == [[getattr(s, name) for name in names] + [s.isatty()] for s in (sys.stdout, sys.stderr)], ways
sys.stdout = None
outlive_readers()
assert sys.stdout is None
"""
    for options in ((), ("-u",), ("-X", "utf8")):
        done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


QUESTION = make_record("hotpotqa", 0) | {"pred": "x"}
RULER = {"_id": "0", "index": 0, "input": "q", "answers": ["a"], "pred": "a", "length": 4000, "dataset": "vt"}


@pytest.mark.parametrize(
    "program, place, row", [("eval.py", "hotpotqa", QUESTION), ("eval_ruler.py", "4096/vt", RULER)]
)
def test_all_files_are_written(tmp_path, program, place, row):
    """Each table is printed before the next one's files are written."""
    runs = [tmp_path / name for name in ("a_64", "b_64")]
    for run in runs:
        write_records(run / place, "rows", [row]).rename(run / place / "SnapKV.json")
    _, error, code = head("-u", program, "--results_dir", tmp_path, lines=0)
    assert (error, code) == ("", 0)
    assert all((folder / "results.csv").is_file() for folder in (*runs, tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        ("-u", "run_longbench.py", "--list_methods"),
        ("-u", "-m", "kvfactory.doctor", "--device", "cpu"),
    ],
    ids=["list_methods", "doctor"],
)
def test_the_commands_end_as_if_they_were_read(command):
    expected = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    _, error, code = head(*command, lines=0)
    assert (error, code) == (expected.stderr, expected.returncode)
