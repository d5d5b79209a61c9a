"""Models of real shapes with random weights, made on the device in seconds: speed does not depend on what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfactory.tiny_models import VOCABULARY, tiny_config

LONGEST_PROMPT = 1 << 20
"""Positions the configs allow: plain RoPE needs no table, so any prompt that fits in memory runs."""


@dataclass(frozen=True)
class Shape:
    """A Llama model's sizes, from its published config.json; `std` is that of the random weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    std: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SHAPES = {
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": Shape(80, 8192, 28672, 64, 8, 128256),
    # Peaked enough at its size that dropping tokens moves the logits.
    "tiny": Shape(3, 96, 80, 6, 2, VOCABULARY, std=0.2),
}


def get_shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"--model {name} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]


def random_model(
    name: str,
    device: str | torch.device,
    dtype: torch.dtype,
    *,
    layers: int | None = None,
    seed: int = 0,
    query_spread: float = 1.0,
    devices: int = 1,
) -> PreTrainedModel:
    """A Llama model of shape `name` with normal weights, in evaluation mode, attending with sdpa.

    Args:
        layers: fewer layers than the shape has.
        query_spread: see `spread_query_scales`; 1 leaves the weights alone.
        devices: GPUs that share the layers, through accelerate.

    Raises:
        ValueError: unknown name, or more devices than there are.
    """
    shape = get_shape(name)
    config = _config(shape, layers or shape.layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(dtype).eval().requires_grad_(False)
    places = _places(model, torch.device(device), devices)
    generators: dict[torch.device, torch.Generator] = {}
    for prefix, place in places.items():
        generator = generators.setdefault(place, torch.Generator(place).manual_seed(seed))
        module = model.get_submodule(prefix).to_empty(device=place)
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, shape.std, generator=generator)
    first = next(iter(places.values()))
    with first:  # its frequencies are computed, not loaded, so they cannot come from the meta device
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(first)
    if query_spread != 1.0:
        spread_query_scales(model, query_spread, seed)
    if devices > 1:
        from accelerate import dispatch_model

        device_map = {prefix: place.index for prefix, place in places.items()}
        dispatch_model(model, device_map | {"model.rotary_emb": first.index})
    return model


def _config(shape: Shape, layers: int):
    return tiny_config(
        "llama",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=LONGEST_PROMPT,
        rope_theta=500000.0,
        initializer_range=shape.std,
    )


def _places(model: nn.Module, device: torch.device, devices: int) -> dict[str, torch.device]:
    """Device of each part that holds weights; layers in equal runs, embedding first, head last."""
    count = len(model.model.layers)
    if devices == 1:
        spread = [device]
    elif device.type != "cuda" or torch.cuda.device_count() < devices:
        raise ValueError(f"--devices {devices} needs as many CUDA devices, there are {torch.cuda.device_count()}")
    else:
        spread = [torch.device("cuda", i) for i in range(devices)]
    places = {"model.embed_tokens": spread[0]}
    places |= {f"model.layers.{i}": spread[i * len(spread) // count] for i in range(count)}
    return places | {"model.norm": spread[-1], "lm_head": spread[-1]}


@torch.no_grad()
def spread_query_scales(model: PreTrainedModel, largest: float, seed: int = 0) -> None:
    """Scales every query head's projection by factors from 1 to `largest`, log-uniform, in another order per layer.

    With plain random weights all heads attend alike and a budget shared out over heads comes out even; with these some
    heads are flat and some peaked, as in trained models.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        factors = torch.logspace(0, 1, config.num_attention_heads, base=largest)
        factors = factors[torch.randperm(len(factors), generator=generator)].to(weight)
        weight.view(config.num_attention_heads, -1, weight.shape[1]).mul_(factors[:, None, None])


def write_head_scores(path: str | Path, layers: int, heads: int, seed: int = 0) -> Path:
    """Writes random, uneven head scores in the published format of HeadKV (`kvfactory.ops.head_scores`).

    A few heads hold most of the score, as published files have it: log-normal, sigma 1.5.
    """
    path, generator = Path(path), torch.Generator().manual_seed(seed)
    scores = (1.5 * torch.randn(layers, heads, generator=generator)).exp()
    content = {f"{i}-{h}": [round(float(scores[i, h]), 6)] for i in range(layers) for h in range(heads)}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def random_ids(model: PreTrainedModel, length: int, seed: int = 0) -> torch.Tensor:
    """(length,) token ids on the CPU, where the runner's prompts come from."""
    return torch.randint(3, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
