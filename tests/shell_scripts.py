"""The shell scripts of `scripts/`, with a stand-in for python that writes its arguments down."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIX = ("0", "snapkv", "128", "sdpa", "./x/", "some/model")
"""The six arguments that the original's scripts take."""
_READ = ("DATA_DIR", "LENGTHS", "METHODS")  # variables that the scripts read: a test sets those it means


def run_script(folder: Path, name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs `scripts/{name}` in `folder`; its output is CUDA=(visible devices), then what python got, one a line."""
    python = folder / "python"
    python.write_text('#!/usr/bin/env bash\necho "CUDA=$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in _READ} | {"PYTHON": str(python)} | environment
    command = ["bash", ROOT / "scripts" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
