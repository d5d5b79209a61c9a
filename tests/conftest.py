"""Shared fixtures: where golden figures and real data are, the bundled model, and decoding without captures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvfactory.decoder import Decoder


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


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedModel:
    """The bundled model in float32 on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvfactory.assets import model_path

    return AutoModelForCausalLM.from_pretrained(model_path("smollm2"), dtype=torch.float32).eval()


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Decoder]:
    """Decoders that replay graphs do so on any device, without capturing them: see `replaying`."""
    from replaying import replaying

    return replaying(monkeypatch)
