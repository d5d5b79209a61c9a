"""A tiny model, two small datasets, and a runner over them."""

from __future__ import annotations

import pytest
from in_process import Runner
from tiny_checkpoint import save_checkpoint, write_dataset


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "Tiny")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data", "hotpotqa", 3)
    write_dataset(tmp_path / "data", "trec", 2)
    return tmp_path / "data"


@pytest.fixture
def run(model, data, tmp_path):
    return Runner(model, data, tmp_path / "out")
