"""Which part of a model goes to which device: --device_map auto, balanced, or a file; decided before weights load.

Parts are what the forward never splits: embedding, each decoder layer, final norm, head. What has no weights of its own
(rotary frequencies) goes where the embedding is, since positions enter there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

CHOICES = ("auto", "balanced")
_FULLEST = 0.85  # of a device's free memory; the rest is for caches and intermediate results

DeviceMap = Mapping[str, "int | str"]
"""Part -> index of a CUDA device or "cpu", as accelerate takes it."""


def whole_parts(model: PreTrainedModel) -> list[str]:
    """Names of the parts that stay whole, in the order of the modules."""
    whole = set(model._no_split_modules or ())

    def walk(name: str, module: nn.Module) -> Iterator[str]:
        if type(module).__name__ in whole or not any(type(m).__name__ in whole for m in module.modules()):
            yield name
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return list(walk("", model))


def weight_bytes(module: nn.Module, itemsize: int) -> int:
    return sum(parameter.numel() for parameter in module.parameters()) * itemsize


def spread(model: PreTrainedModel, shares: Sequence[float]) -> dict[str, int | str]:
    """Consecutive runs of parts for the devices, whose weights are to one another as `shares`.

    Args:
        model: without weights will do.
        shares: one positive number per visible CUDA device.
    """
    sizes = {name: weight_bytes(model.get_submodule(name), 1) for name in whole_parts(model)}
    tied = _tied_head(model)
    total, limits = sum(sizes.values()) - sizes.get(tied, 0), []
    for share in shares:
        limits.append((limits[-1] if limits else 0) + share / sum(shares) * total)
    found: dict[str, int | str] = {}
    before = 0
    for name, size in sizes.items():
        if size == 0 or name == tied:
            found[name] = 0
            continue
        middle = before + size / 2
        found[name] = sum(middle > limit for limit in limits[:-1])
        before += size
    return found


def _tied_head(model: PreTrainedModel) -> str | None:
    """Name of the output head when its weights are the embedding's."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return None
    return next(name for name, module in model.named_modules() if module is head)


def resolve_device_map(
    choice: str, model: PreTrainedModel, device: str, itemsize: int, launches: bool = False
) -> dict[str, int | str] | None:
    """The device of each part, `{"": i}` where one device has all; None for the CPU.

    Args:
        choice: what --device_map says.
        model: the model without weights.
        device: cuda or cpu.
        itemsize: bytes of a weight.
        launches: other processes will run the model. Then the whole memory of a device counts as free: asking for what
            is free would take hundreds of MB of it for a context of our own, and they find out themselves.

    Raises:
        ValueError: balanced without CUDA, weights that do not fit all devices together, a file that is missing,
            broken, or does not give every part of the model one device that is there.
    """
    if choice not in CHOICES:
        return _simplest(_from_file(choice, model, device))
    if device == "cpu":
        if choice == "balanced":
            raise ValueError(
                "--device_map balanced spreads the model over CUDA devices, and this run is on the CPU: leave it out"
            )
        return None
    count = torch.cuda.device_count()
    if choice == "balanced":
        return _simplest(spread(model, [1.0] * count))
    if count <= 1:
        return {"": 0}
    need, free_bytes = weight_bytes(model, itemsize), _memory if launches else _free_memory
    if need <= _FULLEST * free_bytes(0):
        return {"": 0}
    free = [free_bytes(i) for i in range(count)]
    if need > sum(free):
        raise ValueError(
            f"the weights take {need / 2**30:.1f} GiB and the {count} visible CUDA devices have "
            f"{sum(free) / 2**30:.1f} GiB free: choose another --dtype, or keep parts on the CPU with --device_map FILE"
        )
    return _simplest(spread(model, free))


def _free_memory(index: int) -> int:
    return torch.cuda.mem_get_info(index)[0]


def _memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def _simplest(found: dict[str, int | str]) -> dict[str, int | str] | None:
    places = set(found.values())
    if len(places) > 1:
        return found
    place = places.pop()
    return None if place == "cpu" else {"": place}


def is_spread(found: DeviceMap | None) -> bool:
    """Whether a map names several devices."""
    return found is not None and len(set(found.values())) > 1


def _from_file(path: str, model: PreTrainedModel, device: str) -> dict[str, int | str]:
    where = f"--device_map {path}"
    try:
        typed = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except FileNotFoundError:
        raise ValueError(f"{where} is neither {' nor '.join(CHOICES)} nor a file that exists") from None
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): give an object of module name to device") from error
    if not isinstance(typed, dict) or not typed:
        raise ValueError(f'{where} must hold one JSON object of module name to device, such as {{"model": 0}}')
    named = {name: _device(where, name, value, device) for name, value in typed.items()}
    if device == "cuda" and set(named.values()) == {"cpu"}:
        raise ValueError(f"{where} names no CUDA device: give --device cpu with it, or a GPU to some module")
    return _placed(where, named, model)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice")
        found[name] = value
    return found


def _device(where: str, name: str, value: Any, device: str) -> int | str:
    """A device as accelerate takes it; ValueError when it cannot be used here."""
    text = str(value)
    index = text.removeprefix("cuda:") if text != "cuda" else "0"
    if isinstance(value, bool) or not (text == "cpu" or index.isascii() and index.isdigit()):
        raise ValueError(
            f'{where}: {name!r} is on {json.dumps(value)}, which is neither "cpu" nor a CUDA device such as 0 or '
            '"cuda:1"'
        )
    if text == "cpu":
        return "cpu"
    if device == "cpu":
        raise ValueError(f"{where}: {name!r} is on CUDA device {index}, but this run is on the CPU: name cpu alone")
    last = torch.cuda.device_count() - 1
    if int(index) > last:
        raise ValueError(f"{where}: {name!r} is on CUDA device {index}, and the visible ones are 0 to {last}")
    return int(index)


def _placed(where: str, named: dict[str, int | str], model: PreTrainedModel) -> dict[str, int | str]:
    """The device of every part of the model, each named once, alone or with what it lies in."""
    modules, parts = {name for name, _ in model.named_modules()}, whole_parts(model)
    for name in named:
        if name not in modules:
            raise ValueError(f"{where}: {name!r} is no module of this model; its parts are {_some(parts)}")
        if (outer := next((o for o in named if o != name and _inside(name, o)), None)) is not None:
            raise ValueError(f"{where}: {name!r} lies inside {outer!r}, which has a device already: name one of them")
        if (part := next((p for p in parts if p != name and _inside(name, p)), None)) is not None:
            raise ValueError(f"{where}: {name!r} is a piece of {part!r}, which stays whole: name that")
    found = {part: named[outer] for part in parts for outer in named if _inside(part, outer)}
    weightless = [part for part in parts if not any(True for _ in model.get_submodule(part).parameters())]
    if absent := [part for part in parts if part not in found and part not in weightless]:
        raise ValueError(f"{where} gives no device to {_some(absent)}: every part of the model needs one")
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    return found | {part: found[embedding] for part in weightless if part not in found}


def _inside(name: str, outer: str) -> bool:
    return outer == "" or name == outer or name.startswith(outer + ".")


def _some(names: Sequence[str]) -> str:
    if len(names) <= 5:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, ... {', '.join(names[-2:])} ({len(names)} in all)"
