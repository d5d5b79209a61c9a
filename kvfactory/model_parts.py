"""What is read off a model of transformers, and its `generate` as an attached model must have it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfactory.capability import FAMILIES


def attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Attention modules by layer index: the modules that hold a layer index, a scaling and a head size."""
    found = {}
    for module in model.modules():
        if all(hasattr(module, a) for a in ("layer_idx", "scaling", "head_dim")):
            found[module.layer_idx] = module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layers that kvfactory knows; "
            f"supported families: {', '.join(FAMILIES)}"
        )
    return dict(sorted(found.items()))


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids enter: where the embedding runs, which accelerate's hook knows when its weights are elsewhere."""
    embedding = model.get_input_embeddings()
    hook = embedding.__dict__.get("_hf_hook")
    for one in getattr(hook, "hooks", (hook,)):
        if (device := getattr(one, "execution_device", None)) is not None:
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return embedding.weight.device


def lies_on_several_devices(model: PreTrainedModel) -> bool:
    """Whether weights are shared out over devices, by accelerate's map or by hand."""
    mapped = (getattr(model, "hf_device_map", None) or {}).values()
    return len(set(mapped)) > 1 or len({parameter.device for parameter in model.parameters()}) > 1


def rotary_frequencies(model: PreTrainedModel) -> torch.Tensor | None:
    """Rotary frequencies of a model whose frequencies do not depend on the length; None for others."""
    rotary = next((m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "rope_type")), None)
    if rotary is None or rotary.rope_type in ("dynamic", "longrope"):
        return None
    return rotary.inv_freq


def is_full_attention(native: list[Any], layer: int) -> bool:
    """Whether transformers would keep this layer in a plain growing cache."""
    return layer >= len(native) or type(native[layer]) is DynamicLayer


def refusing_chunks(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's `generate`, which refuses to split a prompt: a chunk looks like a whole prompt to the cache."""
    stock = model.generate

    @functools.wraps(stock)
    def generate(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or model.generation_config
        if kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None)) is not None:
            raise ValueError(
                "prefill_chunk_size splits the prompt, and its first chunk would be compressed as if it were all; "
                "leave it out while a method is attached"
            )
        return stock(*args, **kwargs)

    return generate
