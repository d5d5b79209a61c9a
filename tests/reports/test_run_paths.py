"""File names of a run."""

from __future__ import annotations

import re

import pytest

from kvfactory.reports.run_paths import RunPaths, model_name, settings_label, split_shard


def test_layout(tmp_path):
    paths = RunPaths(tmp_path, "meta-llama/Meta-Llama-3-8B-Instruct", "r0.2", "SnapKV+kv_head")
    assert paths.folder == tmp_path / "meta-llama-3-8b-instruct_r0.2"
    assert paths.results("qasper_e") == paths.folder / "qasper_e" / "SnapKV+kv_head.json"
    assert paths.meta == paths.folder / "meta" / "SnapKV+kv_head.json"
    shard = paths.for_shard((1, 4))
    assert shard.results("qasper") == paths.folder / "qasper" / "SnapKV+kv_head.shard1of4.json"
    assert shard.meta == paths.folder / "meta" / "SnapKV+kv_head.shard1of4.json"
    assert shard.for_shard(None).meta == paths.meta
    assert split_shard(shard.meta.stem) == ("SnapKV+kv_head", (1, 4))
    assert split_shard("SnapKV+kv_head") == ("SnapKV+kv_head", None)


def test_model_name(tmp_path, monkeypatch):
    assert model_name("/models/Mistral-7B/") == "mistral-7b"
    (tmp_path / "Phi-3").mkdir()
    monkeypatch.chdir(tmp_path / "Phi-3")
    assert model_name(".") == model_name("./") == "phi-3"


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_shard_out_of_range(tmp_path, shard):
    with pytest.raises(ValueError, match=f"--shard_id {shard[0]} .*--num_shards {shard[1]}"):
        RunPaths(tmp_path, "m", "512", "FullKV", shard)


@pytest.mark.parametrize("label", ["a/b", "", "..", "x.shard0of2"])
def test_bad_label(tmp_path, label):
    with pytest.raises(ValueError, match="--run_name"):
        RunPaths(tmp_path, "m", "512", label)


def test_meta_is_no_dataset(tmp_path):
    with pytest.raises(ValueError, match="meta"):
        RunPaths(tmp_path, "m", "512", "FullKV").results("meta")


def test_settings_label_names_what_has_a_tag_and_hashes_the_rest():
    assert settings_label("SnapKV", [], {}) == "SnapKV"
    assert settings_label("SnapKV", ["kv_head", "kivi4"], {}) == "SnapKV+kv_head+kivi4"
    label = settings_label("SnapKV", ["kv_head"], {"kernel_size": 5})
    assert re.fullmatch(r"SnapKV\+kv_head\+h[0-9a-f]{6}", label)


def test_settings_label_hash_is_pinned():
    """Labels are file names of results on disk: a change of this value orphans every one of them."""
    label = settings_label("SnapKV", [], {"kernel_size": 5, "floor": 0.1})
    # sha256 of b'{"floor":0.1,"kernel_size":5}'
    assert label == "SnapKV+h15ddc3"


def test_settings_label_hash_follows_the_values_only():
    def label(**others):
        return settings_label("X", [], others)

    assert label(a=1, b=0.1) == label(b=0.1, a=1.0) == label(a=1, b=1e-1)
    assert label(a=[1, 2.0]) == label(a=(1, 2))
    assert label(a=True) != label(a=1)
    assert label(a="1") != label(a=1)
    assert label(a=None) != label()
    assert label(d={"x": 1, "y": 2}) == label(d={"y": 2, "x": 1.0}) != label(d={"x": 2, "y": 1})
    different = [label(a=i / 7, b=j) for i in range(10) for j in ("mean", "max")]
    assert len(set(different)) == len(different)


def test_settings_label_refuses():
    with pytest.raises(ValueError):
        settings_label("X", ["a+b"], {})
    with pytest.raises(ValueError):
        settings_label("X", [""], {})
    with pytest.raises(ValueError):
        settings_label("X", ["a/b"], {})
    with pytest.raises(ValueError):
        settings_label("X", [], {"a": float("inf")})
