"""Versions and code revision."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

import kvfactory
from kvfactory.reports.environment import code_revision, collect_environment, package_versions


def git(folder, *args):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "kvfactory"
    package.mkdir()
    (package / "version.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "kvfactory/version.py")
    git(tmp_path, "commit", "-q", "-m", "x")
    return package


def test_versions():
    found = package_versions(["pytest", "no-such-package"])
    assert found == {"kvfactory": kvfactory.__version__, "pytest": pytest.__version__, "no-such-package": None}


def test_revision_and_dirt(checkout, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as inside a hook of another repository
    commit = git(checkout, "--git-dir", str(checkout.parent / ".git"), "rev-parse", "HEAD")
    assert code_revision(checkout) == {"commit": commit, "dirty": False}
    (checkout / "new.py").write_text("")  # an untracked file, such as results, is no change of the code
    assert code_revision(checkout)["dirty"] is False
    (checkout / "version.py").write_text("2")
    assert code_revision(checkout) == {"commit": commit, "dirty": True}


def test_copy_installed_in_another_checkout_is_not_that_checkout(checkout):
    installed = checkout.parent / ".venv" / "kvfactory"
    shutil.copytree(checkout, installed)
    assert code_revision(installed) is None


def test_no_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert code_revision(checkout) is None


def test_environment_is_json():
    found = collect_environment({"gpu": None, "cores": 2}, argv=["run_longbench.py", "--method", "snapkv"])
    assert json.loads(json.dumps(found)) == found
    assert found["hardware"] == {"gpu": None, "cores": 2} and found["argv"][1] == "--method"
    assert {"versions", "code", "python", "platform"} <= set(found)
