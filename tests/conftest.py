"""Shared fixtures: where golden figures and real data are, and small determinism helpers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    folder = Path(value)
    if not folder.is_dir():
        pytest.fail(f"{variable}={value} is not a folder")
    return folder


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the golden figures (KVFACTORY_GOLDEN); skips when unset, fails when set and missing."""
    return _folder("KVFACTORY_GOLDEN")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real data (KVFACTORY_DATA) holding LongBench/; skips when unset, fails when set and missing."""
    return _folder("KVFACTORY_DATA")
