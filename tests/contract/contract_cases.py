"""What the contract runs over: every registered method, with the smallest options that make it act on a tiny model."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import step

from kvfactory import attach, detach
from kvfactory.cache.kv_cache import KVCache
from kvfactory.generation import GenerationOutput, generate
from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS
from kvfactory.methods.base import KVCluster

ALL = METHODS.names()
GRANULARITIES = ("query_head", "kv_head")
PROMPT = 61
BUDGET = 24


def capability(method: str):
    return METHODS.get(method).capability


EVICTING = [m for m in ALL if capability(m).stage == "prompt-evict"]
DROPPING = [m for m in ALL if capability(m).drops_tokens]
RANDOMISED = [m for m in ALL if capability(m).randomised]
# A method that rewrites keys or values (or the prompt pass) is not described by a mask over the stock model's keys.
MERGING = [m for m in EVICTING if METHODS.get(m).before_attend is not KVCluster.before_attend]
MASKABLE = [m for m in EVICTING if m not in MERGING]


def options(method: str, budget: int = BUDGET, **more: Any) -> dict[str, Any]:
    return {"max_capacity_prompt": budget, **REQUIRED_SETTINGS.get(method, {}), **more}


def method_granularity(methods: list[str]):
    cells = [(m, g) for m in methods for g in capability(m).granularities]
    return pytest.mark.parametrize("method, granularity", cells, ids=["-".join(c) for c in cells])


@contextmanager
def attached(model, method: str, **more: Any):
    """The method on `model` with `options`, detached at the end."""
    attachment = attach(model, method, **options(method, **more))
    try:
        yield attachment
    finally:
        detach(model)


@torch.no_grad()
def logits_of(
    model, attachment, prompt: torch.Tensor, chunks: list[torch.Tensor]
) -> tuple[list[torch.Tensor], KVCache]:
    """Logits of the prompt and of each later chunk, and the cache, without any generation code."""
    cache = attachment.new_cache(example_id="e", max_new_tokens=3)  # the store has to grow
    return [step(model, prompt, cache)] + [step(model, chunk, cache) for chunk in chunks], cache


def run(model, method: str, prompt: torch.Tensor, new: int = 6, decode: str = "loop", **more: Any) -> GenerationOutput:
    with attached(model, method, **more):
        return generate(model, prompt, new, eos_token_id=[], decode=decode, example_id="e")


def held(cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of all keys and values in use, per layer."""
    return [tuple(x.clone() for x in layer.store.view()) for layer in cache.kv_layers]


def same(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, r in zip(a, b, strict=True) for x, y in zip(p, r, strict=True)
    )
