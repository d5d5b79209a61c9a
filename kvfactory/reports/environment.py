"""What a run ran on: package versions, code revision and platform, for the run record."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvfactory.version import __version__

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "datasets",
    "gguf",
    "numpy",
    "triton",
    "flash-attn",
    "fa3-fwd",
    "hqq",
    "minference",
    "rouge-score",
    "fuzzywuzzy",
    "Levenshtein",
    "rapidfuzz",
    "jieba",
)


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each package, None when it is absent; nothing is imported."""
    found: dict[str, str | None] = {"kvfactory": __version__}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def code_revision(package: Path | None = None) -> dict[str, Any] | None:
    """{"commit": hash, "dirty": whether tracked files differ from it} of the checkout that holds `package`.

    None when the package is not tracked by git (an installed copy inside somebody else's checkout is not ours), or
    git is absent or refuses.
    """
    package = Path(__file__).resolve().parents[1] if package is None else package
    # inside a git hook GIT_DIR names another repository
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*args: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *args]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "version.py")
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def collect_environment(hardware: Mapping[str, Any], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """One segment's facts: `hardware` as the caller measured it, plus versions, code, platform and command line."""
    return {
        "argv": list(sys.argv if argv is None else argv),
        "versions": package_versions(),
        "code": code_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": dict(hardware),
    }
