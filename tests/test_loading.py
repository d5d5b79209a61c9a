"""Opening checkpoints: what is wrong with one is said in one sentence before its weights are read."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from tiny_checkpoint import save_checkpoint

from kvfactory import loading
from kvfactory.loading import (
    check_attachable,
    checkpoint_dtype,
    load_model,
    open_checkpoint,
    resolve_computation,
    tokenizer_sha256,
    weights_sha256,
)
from kvfactory.plan import make_plan


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "tiny")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_checkpoint_opens_and_loads_with_sdpa(folder):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.revision is None and checkpoint.name == str(folder)
    computation = resolve_computation(checkpoint, device="cpu")
    assert (computation.device, computation.dtype) == ("cpu", "float32")
    assert (computation.attn_implementation, computation.decode) == ("sdpa", "loop")
    model = load_model(checkpoint, computation)
    assert not model.training and model.dtype == torch.float32 and model.config._attn_implementation == "sdpa"
    half = load_model(checkpoint, resolve_computation(checkpoint, device="cpu", dtype="bfloat16"))
    assert half.dtype == torch.bfloat16


def broken_config(folder):
    (folder / "config.json").write_text("{not json")


def unknown_type(folder):
    edit_config(folder, model_type="nosuchmodel", architectures=None)


def encoder_only(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))


def no_config(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def torn_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_tokenizer(folder):
    for name in loading.TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def broken_generation_config(folder):
    (folder / "generation_config.json").write_text("[")


def incomplete_shards(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))


def broken_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    "damage, told",
    [
        (broken_config, "config.json"),
        (unknown_type, "nosuchmodel"),
        (encoder_only, "not a language model"),
        (no_config, "no config.json"),
        (no_weights, "no weights"),
        (torn_weights, "model.safetensors cannot be read"),
        (no_tokenizer, "no tokenizer"),
        (broken_tokenizer, "tokenizer cannot be loaded"),
        (broken_generation_config, "generation_config.json"),
        (incomplete_shards, "lacks the weight file model-00001.safetensors"),
        (broken_index, "index.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(folder, damage, told):
    damage(folder)
    with pytest.raises(ValueError) as refusal:
        open_checkpoint(str(folder))
    text = str(refusal.value)
    assert text.startswith(f"--model_path {folder}") and told in text and "\n" not in text


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c", "~/missing"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(loading, "_from_hub", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="does not exist"):
        open_checkpoint(path)


def test_a_bare_word_that_names_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no bundled model .smollm2"):
        open_checkpoint("smollm3")


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        open_checkpoint(str(tmp_path / "x"))


def test_a_hub_id_without_network_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError) as refusal:
        open_checkpoint("nobody/nothing")
    assert "--model_path nobody/nothing" in str(refusal.value) and "local folder" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_hub_snapshot_gives_its_revision(original, monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = shutil.copytree(original, tmp_path / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(snapshot))
    checkpoint = open_checkpoint("org/model")
    assert (checkpoint.name, checkpoint.revision, checkpoint.folder) == ("org/model", commit, snapshot)


@pytest.mark.parametrize("layers", [2, 4])
def test_a_config_of_another_number_of_layers_is_refused(folder, layers):
    edit_config(folder, num_hidden_layers=layers)
    with pytest.raises(ValueError, match=rf"^--model_path {folder}: .* says {layers} layers .* weights hold 3"):
        open_checkpoint(str(folder))


def test_layers_that_draft_tokens_may_be_stored_behind_the_others(folder):
    edit_config(folder, num_hidden_layers=2, num_nextn_predict_layers=1)
    assert open_checkpoint(str(folder)).config.num_hidden_layers == 2


def test_weights_that_do_not_fit_the_config_are_refused(folder):
    edit_config(folder, attention_bias=True)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ValueError, match=r"do not fit its config \(missing keys: model.layers.0"):
        load_model(checkpoint, resolve_computation(checkpoint, device="cpu"))


def test_heads_that_do_not_divide_the_hidden_size_are_refused(folder):
    """Newer transformers refuse the config, older ones see it only at the weights."""
    edit_config(folder, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ValueError, match=f"^--model_path {folder}: its ") as refusal:
        checkpoint = open_checkpoint(str(folder))
        load_model(checkpoint, resolve_computation(checkpoint, device="cpu"))
    assert "\n" not in str(refusal.value)


def test_weights_of_another_shape_are_refused(folder):
    edit_config(folder, intermediate_size=50)
    checkpoint = open_checkpoint(str(folder))
    misfit = r"\(model.layers.0.mlp.down_proj.weight is \[32, 48\] in the weights and \[32, 50\] by the config\)"
    with pytest.raises(ValueError, match=f"^--model_path {folder}: its weights .* {misfit}"):
        load_model(checkpoint, resolve_computation(checkpoint, device="cpu"))


def test_a_tokenizer_without_template_and_pad_token_is_fine(tmp_path):
    tokenizer = open_checkpoint(str(save_checkpoint(tmp_path / "base", chat=False))).tokenizer
    assert tokenizer.chat_template is None and tokenizer.pad_token is None


def test_cuda_asked_for_and_absent(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ValueError, match="--device cuda: there is no CUDA device"):
        resolve_computation(checkpoint, device="cuda")
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(ValueError, match=f"--attn_implementation {name} needs"):
            resolve_computation(checkpoint, device="cpu", attn_implementation=name)


def test_auto_dtype_is_the_checkpoints_on_cuda(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("KVFACTORY_KERNELS", "torch")  # no GPU to ask for its name
    edit_config(folder, dtype="bfloat16", torch_dtype="bfloat16")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint_dtype(checkpoint) == torch.bfloat16
    assert resolve_computation(checkpoint).dtype == "bfloat16"
    assert resolve_computation(checkpoint, device="cpu").dtype == "float32"


def test_a_config_without_dtype_follows_the_weights(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    assert checkpoint_dtype(open_checkpoint(str(folder))) == torch.float32


def test_a_family_off_the_attention_interface_is_refused(folder):
    edit_config(folder, model_type="bloom", architectures=None, n_layer=2, n_head=4, hidden_size=32)
    with pytest.raises(ValueError, match="supported families|cannot build this model"):
        checkpoint = open_checkpoint(str(folder))
        check_attachable(checkpoint, [make_plan("snapkv")], resolve_computation(checkpoint, "cpu"))


def test_a_model_whose_layers_all_slide_is_refused(folder):
    edit_config(folder, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    checkpoint = open_checkpoint(str(folder))
    computation = resolve_computation(checkpoint, "cpu")
    check_attachable(checkpoint, [make_plan("fullkv")], computation)
    with pytest.raises(ValueError, match="SnapKV has nothing to compress"):
        check_attachable(checkpoint, [make_plan("snapkv")], computation)


def test_hashes_see_every_byte_and_only_the_edges_of_large_files(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 1000)
    whole, how = weights_sha256([file])
    assert how == "every byte"
    assert whole == hashlib.sha256(b"model.safetensors\0" + b"1000\0" + b"a" * 1000).hexdigest()
    monkeypatch.setattr(loading, "FULL_HASH_BYTES", 999)
    monkeypatch.setattr(loading, "EDGE_BYTES", 10)
    edges, how = weights_sha256([file])
    assert "first and last MiB" in how
    file.write_bytes(b"a" * 500 + b"b" + b"a" * 499)
    assert weights_sha256([file])[0] == edges
    for changed in (b"b" + b"a" * 999, b"a" * 999 + b"b", b"a" * 1001):
        file.write_bytes(changed)
        assert weights_sha256([file])[0] != edges


def test_the_tokenizer_hash_changes_with_its_files(folder):
    before = tokenizer_sha256(folder)
    (folder / "unrelated.txt").write_text("x")
    assert tokenizer_sha256(folder) == before
    about = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": "x"}))
    assert tokenizer_sha256(folder) != before


def check(folder, **options):
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ValueError) as refusal:
        check_attachable(checkpoint, [make_plan("snapkv", **options)], resolve_computation(checkpoint, "cpu"))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize("kind", ["opt", "bloom"])
def test_a_model_that_no_method_can_be_attached_to_is_named(folder, kind):
    size = {"opt": {"num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}, "bloom": {"n_head": 4}}[kind]
    config = {"model_type": kind, "vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config | size))
    for name in ("model.safetensors",):
        (folder / name).write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # a header without tensors
    assert check(folder).startswith(f"--model_path {folder}")
