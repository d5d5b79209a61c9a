"""Locks, whole-file writes and the writability probe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvfactory.reports.files import FileInUse, FileLock, check_file_name, check_writable, json_bytes, write_atomically

HOLD = """
import sys
from pathlib import Path
from kvfactory.reports.files import FileLock
lock = FileLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that owns tmp_path/a.json until its input is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "a.json")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def test_second_process_is_refused_with_file_and_pid(tmp_path, holder):
    with pytest.raises(FileInUse) as error:
        FileLock(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(error.value) and f"process {holder.pid} " in str(error.value)
    FileLock(tmp_path / "b.json").release()  # another file is free


def test_second_owner_in_one_process_is_refused(tmp_path):
    with FileLock(tmp_path / "a.json"), pytest.raises(FileInUse):
        FileLock(tmp_path / "a.json")
    FileLock(tmp_path / "a.json").release()


def test_two_names_of_one_file_share_the_lock(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    with FileLock(tmp_path / "a.json"), pytest.raises(FileInUse):
        FileLock(tmp_path / "link.json")


def test_lock_of_a_killed_process_does_not_block(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert (tmp_path / "a.json.lock").exists()
    with FileLock(tmp_path / "a.json"):
        assert f"process {os.getpid()} " in (tmp_path / "a.json.lock").read_text()
    assert list(tmp_path.iterdir()) == []


def test_waiting_owner_gets_the_file_in_the_end(tmp_path, holder):
    code = (
        "import sys; from pathlib import Path; from kvfactory.reports.files import FileLock\n"
        "FileLock(Path(sys.argv[1]), wait=True); print('mine')"
    )
    second = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a.json")], stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.3)
    holder.stdin.close()
    # the first owner removed the sidecar that the second had open: it must have taken the lock on a new one
    assert second.communicate(timeout=10)[0] == "mine\n"


def test_lock_on_a_removed_sidecar_does_not_count(tmp_path, monkeypatch):
    """Between our open and our lock the former owner removes its sidecar, and a third process makes a new one."""
    import fcntl

    path = tmp_path / "a.json"
    real, others = fcntl.flock, []

    def flock(fd, operation):
        if not others:
            (tmp_path / "a.json.lock").unlink()
            others.append(None)
            others.append(FileLock(path))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(FileInUse):
        FileLock(path)
    others[1].release()


def test_release_leaves_no_folder_that_stayed_empty(tmp_path):
    target = tmp_path / "x" / "y" / "a.json"
    FileLock(target).release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").mkdir()
    FileLock(target).release()
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]  # it was there before
    with FileLock(target):
        target.write_text("{}")
    assert target.exists()


@pytest.mark.parametrize("folder", ["file/sub", "/proc/kvfactory"])
def test_lock_in_an_impossible_folder_names_save_dir(tmp_path, folder):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="--save_dir"):
        FileLock(tmp_path / folder / "a.json")


def test_write_atomically_replaces_whole_and_keeps_a_link(tmp_path, monkeypatch):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    write_atomically(link, b"one")
    assert link.is_symlink() and real.read_bytes() == b"one"

    def dies(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(real, b"two")
    assert real.read_bytes() == b"one"


def test_write_atomically_names_the_file_on_failure(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file/a.json .--save_dir"):
        write_atomically(tmp_path / "file" / "a.json", b"")


def test_json_bytes():
    assert json_bytes({"a": "é\u2028漢"}) == '{"a": "é\u2028漢"}'.encode()
    assert json_bytes({"a": "é\ud800"}) == b'{"a": "\\u00e9\\ud800"}'
    with pytest.raises(ValueError):
        json_bytes({"a": float("nan")})


@pytest.mark.parametrize("there", [True, False])
def test_check_writable_leaves_nothing(tmp_path, there):
    folder = tmp_path / "results"
    if there:
        folder.mkdir()
    check_writable(folder if there else folder / "deep" / "er")
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])


def test_check_writable_refuses(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder in (tmp_path / "file", tmp_path / "file" / "below" / "it", tmp_path / "dangling", Path("/proc/results")):
        with pytest.raises(ValueError) as error:
            check_writable(folder)
        assert f"--save_dir {folder}" in str(error.value) and "\n" not in str(error.value)
        assert "None" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")
def test_check_writable_refuses_a_read_only_folder(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(ValueError, match="Permission denied"):
        check_writable(tmp_path / "locked" / "results")


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "a\\b", "a\nb", "a\0b", "\ud800", "é" * 101])
def test_check_file_name_refuses(name):
    with pytest.raises(ValueError, match="budget .* cannot be a file name: it "):
        check_file_name(name, "budget")


def test_a_long_file_name_is_cut_in_the_message():
    with pytest.raises(ValueError, match="budget '9.*longer than 200 bytes") as error:
        check_file_name("9" * 4000, "budget")
    assert len(str(error.value)) < 200


def test_check_file_name_accepts():
    assert check_file_name("SnapKV+kv_head+r0.2 漢", "label") == "SnapKV+kv_head+r0.2 漢"
