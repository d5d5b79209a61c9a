"""A checkpoint's weight files: which they are, and what their headers say before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SAFETENSORS_INDEX = "model.safetensors.index.json"
_LAYER_OF = re.compile(r"model\.layers\.(\d+)\.")


def find_weights(folder: Path, model_path: str) -> tuple[Path, ...]:
    """A checkpoint's weight files, sorted by name, each with a header that fits its size.

    Raises:
        ValueError: one sentence saying which file is missing or unreadable.
    """
    index = folder / SAFETENSORS_INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"--model_path {model_path}: {index.name} cannot be read ({error_line(error)})") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"--model_path {model_path} lacks the weight file {missing[0]} that {index.name} names")
        found = [folder / name for name in names]
    else:
        found = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
        found = found or sorted(folder.glob("pytorch_model*.bin"))
    if not found:
        raise ValueError(f"--model_path {model_path} holds no weights (model.safetensors)")
    for file in found:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass  # reads the header and compares it with the file's size
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"--model_path {model_path}: the weight file {file.name} cannot be read ({error_line(error)})"
                ) from error
    return tuple(found)


def stored_shapes(weights: Iterable[Path]) -> dict[str, list[int]]:
    """{tensor: its shape} from the headers of safetensors files; other files are passed over."""
    shapes: dict[str, list[int]] = {}
    for file in weights:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    return shapes


def check_layers(weights: Iterable[Path], config: Any, model_path: str) -> None:
    """Refuses a config of another number of layers than the weights have; surplus ones would load unnoticed."""
    stored = {int(match[1]) for match in map(_LAYER_OF.match, stored_shapes(weights)) if match}
    text = config.get_text_config(decoder=True)
    told = getattr(text, "num_hidden_layers", None)
    if not stored or told is None:
        return
    extra = getattr(text, "num_nextn_predict_layers", None) or 0  # layers that draft tokens, stored behind the others
    if not told <= max(stored) + 1 <= told + extra:
        raise ValueError(
            f"--model_path {model_path}: its config.json says {told} layers (num_hidden_layers), its weights hold "
            f"{max(stored) + 1}: they do not fit its config"
        )


def error_line(error: BaseException) -> str:
    """An error's text as one line without its final stop, at most 300 characters."""
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
