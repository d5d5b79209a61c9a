"""A model by path or name: config and tokenizer first, weights only when everything else has been checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvfactory.assets import ASSETS, resolve_model
from kvfactory.backends import get_backend
from kvfactory.device_map import DeviceMap, resolve_device_map
from kvfactory.graph_support import graph_obstacle
from kvfactory.kernels.dispatch import why_torch
from kvfactory.monkeypatch import attach_plan, detach
from kvfactory.plan import Plan
from kvfactory.weight_files import check_layers, error_line, find_weights, stored_shapes

FULL_HASH_BYTES = 10**9  # checkpoints up to this size are hashed whole
EDGE_BYTES = 2**20
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja"),
)
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_HALF = (torch.float16, torch.bfloat16)
# huggingface_hub's strict classes, with which newer transformers check a config, raise errors of their own.
_CONFIG_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a model before its weights are in memory.

    Attributes:
        name: what --model_path says (for a bundled model its folder), which names the result folder.
        weights: weight files, sorted by name.
        revision: the hub's commit, None for a local folder.
    """

    name: str
    folder: Path
    config: Any
    tokenizer: Any
    generation_config: Any
    weights: tuple[Path, ...]
    revision: str | None

    def facts(self) -> dict[str, Any]:
        """Identity of model and tokenizer for the run record."""
        weights, how = weights_sha256(self.weights)
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return {
            "model": {
                "type": self.config.model_type,
                "revision": self.revision,
                "weights_sha256": weights,
                "weights_hashed": how,
                "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
            },
            "tokenizer": {"sha256": tokenizer_sha256(self.folder)},
        }


@dataclass(frozen=True)
class Computation:
    """Resolved choices of how the model runs.

    Attributes:
        fuse: the model's small operations run as fused kernels.
        device_map: device of each part of the model; None on the CPU.
    """

    device: str
    dtype: str
    attn_implementation: str
    decode: str
    fuse: bool = False
    device_map: DeviceMap | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def with_decode(self, decode: str) -> Computation:
        """The same, `decode` resolved where it is still open."""
        return dataclasses.replace(self, decode=decode) if self.decode in ("auto", "graph") else self


def quiet_transformers() -> None:
    """Keeps transformers' own advice (deprecations, unused weights) off the user's screen; errors stay."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def open_checkpoint(model_path: str, use_fast_tokenizer: bool = True) -> Checkpoint:
    """Config, tokenizer and the list of weight files of a model; no weights are read.

    Args:
        model_path: local folder, hub id, or the name of a bundled model.

    Raises:
        ValueError: one sentence saying what is missing or unreadable, or that the hub cannot be reached.
    """
    quiet_transformers()
    folder, revision = _folder(model_path)
    config = _config(folder, model_path)
    tokenizer = _tokenizer(folder, model_path, use_fast_tokenizer)
    generation = None
    if (folder / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--model_path {model_path}: its generation_config.json cannot be read ({error_line(error)})"
            ) from error
    weights = find_weights(folder, model_path)
    check_layers(weights, config, model_path)
    name = str(folder) if str(model_path).lower() in ASSETS else str(model_path)
    return Checkpoint(name, folder, config, tokenizer, generation, weights, revision)


def _folder(model_path: str) -> tuple[Path, str | None]:
    """(local folder, hub revision or None); a hub id is fetched first, without its weights when they are not wanted."""
    path = Path(resolve_model(model_path)).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--model_path {model_path} holds no config.json, so it is not a model's folder")
        return path, None
    if path.exists():
        raise ValueError(f"--model_path {model_path} is a file: give the folder of the model")
    text = str(model_path)
    parts = text.split("/")
    if len(parts) > 2 or not all(parts) or text[0] in "./~":
        raise ValueError(f"--model_path {model_path} does not exist: give a local folder, a hub id, or smollm2")
    if len(parts) == 1:
        raise ValueError(
            f"--model_path {model_path} is no folder here, no hub id (organisation/name) and no bundled model "
            f"({', '.join(ASSETS)})"
        )
    return _from_hub(text)


def _from_hub(hub_id: str) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # A gated or missing repository answers like any HTTP error; offline, the cache alone is looked at.
    problems = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError)
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except problems as error:
        raise ValueError(
            f"--model_path {hub_id} is no local folder and could not be had from the hub "
            f"({type(error).__name__}: {error_line(error)}): check the id, the network and the access rights, or give "
            "a local folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model_path {hub_id} holds no config.json, so it is not a model of transformers")
    return folder, folder.name


def _config(folder: Path, model_path: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder)
    except _CONFIG_ERRORS as error:
        raise ValueError(f"--model_path {model_path}: its config.json cannot be read ({error_line(error)})") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"--model_path {model_path} is of type {config.model_type!r}, which is not a language model that "
            "transformers can generate with"
        )
    return config


def _tokenizer(folder: Path, model_path: str, use_fast: bool) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"--model_path {model_path} holds no tokenizer (none of {', '.join(TOKENIZER_FILES[:3])} ...)")
    try:
        return AutoTokenizer.from_pretrained(folder, use_fast=use_fast)
    except Exception as error:  # the Rust library raises bare Exception for a broken tokenizer.json
        raise ValueError(f"--model_path {model_path}: its tokenizer cannot be loaded ({error_line(error)})") from error


def _without_weights(checkpoint: Checkpoint) -> PreTrainedModel:
    """The model on the meta device.

    Raises:
        ValueError: transformers cannot build it with sdpa attention.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(checkpoint.config, attn_implementation="sdpa")
    except (ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--model_path {checkpoint.name}: transformers cannot build this model with sdpa attention "
            f"({error_line(error)})"
        ) from error


def _first_misfit(checkpoint: Checkpoint) -> str | None:
    """The first tensor, by name, whose stored shape is not the config's, with both shapes; None if there is none."""
    model = _without_weights(checkpoint)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = stored_shapes(checkpoint.weights)
    for name in sorted(stored):
        if name in wanted and stored[name] != wanted[name]:
            return f"{name} is {stored[name]} in the weights and {wanted[name]} by the config"
    return None


def weights_sha256(files: Iterable[Path]) -> tuple[str, str]:
    """(SHA-256 of a checkpoint's weight files in name order, what was hashed).

    Up to `FULL_HASH_BYTES` in total every byte counts, above it each file's size and its first and last MiB.
    """
    files = sorted(files)
    whole = sum(file.stat().st_size for file in files) <= FULL_HASH_BYTES
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if whole:
                for block in iter(lambda: stream.read(1 << 20), b""):
                    digest.update(block)
            else:
                digest.update(stream.read(EDGE_BYTES))
                stream.seek(max(0, size - EDGE_BYTES))
                digest.update(stream.read(EDGE_BYTES))
    return digest.hexdigest(), "every byte" if whole else "size, first and last MiB of each file"


def tokenizer_sha256(folder: Path) -> str:
    """SHA-256 of a tokenizer's files, which is the same under every version of transformers."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The checkpoint's precision: its config's, else that of its first floating-point tensor, else float32."""
    named = getattr(checkpoint.config, "dtype", None) or getattr(checkpoint.config, "torch_dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for file in checkpoint.weights:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    kind = tensors.get_slice(name).get_dtype()
                    if kind in kinds:
                        return kinds[kind]
    return torch.float32


def resolve_computation(
    checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto", attn_implementation: str = "auto",
    decode: str = "auto", device_map: str = "auto", fuse: str = "auto", *, launches: bool = False,
) -> Computation:  # fmt: skip
    """Every `auto` replaced by what it means here; `decode` stays auto on CUDA, since it depends on the method.

    Args:
        launches: other processes will run the model, so no CUDA context is made here.

    Raises:
        ValueError: CUDA or a flash package asked for and absent, a precision that the kernels do not take, or a
            device map that this model or this machine cannot follow.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here (or this torch is built without it); use cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        kind = checkpoint_dtype(checkpoint) if device == "cuda" else torch.float32
        dtype = str(kind).removeprefix("torch.")
    if attn_implementation == "auto":
        attn_implementation = "sdpa"
    get_backend(attn_implementation)
    if attn_implementation.startswith("flash"):
        if device != "cuda":
            raise ValueError(f"--attn_implementation {attn_implementation} needs --device cuda; use sdpa on the CPU")
        if getattr(torch, dtype) not in _HALF:
            raise ValueError(
                f"--attn_implementation {attn_implementation} needs float16 or bfloat16, not {dtype}; use sdpa, or "
                "--dtype bfloat16"
            )
    if decode == "graph" and device != "cuda":
        raise ValueError("--decode graph replays CUDA graphs and needs --device cuda; use loop on the CPU")
    if decode == "auto" and device != "cuda":
        decode = "loop"
    places = None
    if device == "cuda" or device_map != "auto":
        itemsize = getattr(torch, dtype).itemsize
        places = resolve_device_map(device_map, _without_weights(checkpoint), device, itemsize, launches)
    fuses = fuse == "auto" and device == "cuda" and getattr(torch, dtype) in _HALF and why_torch(device) is None
    return Computation(device, dtype, attn_implementation, decode, fuses, places)


def check_attachable(
    checkpoint: Checkpoint, plans: Iterable[Plan], computation: Computation
) -> list[tuple[Computation, str | None]]:
    """Attaches every plan to a model without weights, so that what cannot work is refused before they load.

    Returns:
        For each plan the computation with its way of decoding, and why that is not the graph where one was possible
        or asked for.

    Raises:
        ValueError: a model family off transformers' attention interface, or a method that this model leaves nothing
            to do.
    """
    model = _without_weights(checkpoint)
    if computation.device_map is not None:
        model.hf_device_map = dict(computation.device_map)  # as it will be once weights are there
    found = []
    for plan in plans:
        try:
            attachment = attach_plan(model, plan, computation.attn_implementation)
        except ValueError as error:
            if str(error).startswith("--"):
                raise  # it names the flag to blame
            raise ValueError(f"--model_path {checkpoint.name}: {error}") from error
        obstacle = None
        if computation.decode in ("auto", "graph"):
            obstacle = graph_obstacle(attachment, plan, torch.device(computation.device), computation.torch_dtype)
        found.append((computation.with_decode("graph" if obstacle is None else "loop"), obstacle))
        detach(model)
    return found


def load_model(checkpoint: Checkpoint, computation: Computation) -> PreTrainedModel:
    """The model in evaluation mode, on the devices of `computation`. A single CUDA device becomes the current one.

    Raises:
        ValueError: weights that are broken, missing or of another shape than the config says.
    """
    dtype = getattr(torch, computation.dtype)
    options: dict[str, Any] = {}
    if computation.device_map is not None:
        options["device_map"] = dict(computation.device_map)
        if len(computation.device_map) == 1:
            torch.cuda.set_device(next(iter(computation.device_map.values())))
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise ValueError(
                f"--model_path {checkpoint.name} does not fit the device's memory ({error_line(error)})"
            ) from error
        why = _first_misfit(checkpoint) or error_line(error)
        raise ValueError(f"--model_path {checkpoint.name}: its weights cannot be loaded ({why})") from error
    bad = {kind: sorted(str(name) for name in info[kind]) for kind in ("missing_keys", "mismatched_keys")}
    for kind, names in bad.items():
        if names:
            if kind == "mismatched_keys" and (misfit := _first_misfit(checkpoint)):
                raise ValueError(f"--model_path {checkpoint.name}: its weights do not fit its config ({misfit})")
            raise ValueError(
                f"--model_path {checkpoint.name}: its weights do not fit its config ({kind.replace('_', ' ')}: "
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
            )
    return model.eval()


def hardware(device: str, device_map: DeviceMap | None = None) -> dict[str, Any]:
    """What the model runs on, for the run record."""
    facts: dict[str, Any] = {"device": device, "cpu_threads": torch.get_num_threads(), "cpus": os.cpu_count()}
    if device == "cuda":
        count = torch.cuda.device_count()
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        facts["gpu_bytes"] = [torch.cuda.get_device_properties(i).total_memory for i in range(count)]
        facts["cuda"] = torch.version.cuda
    if device_map is not None:
        facts["device_map"] = {part: f"cuda:{i}" if isinstance(i, int) else i for part, i in device_map.items()}
    return facts
