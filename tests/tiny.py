"""Tiny models for tests: those of `kvfactory.tiny_models`, shared within a process, and odd shapes of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfactory.cache.kv_cache import AttachedCache
from kvfactory.monkeypatch import cache_keyword
from kvfactory.tiny_models import random_prompt, tiny_config, tiny_model

__all__ = ["SHAPES", "random_prompt", "shared_model", "step", "tiny_config", "tiny_model"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-9-heads": dict(hidden_size=90, num_attention_heads=9, num_key_value_heads=3, head_dim=16),  # 9 * 16 != 90
    "llama-mha": dict(num_attention_heads=6, num_key_value_heads=6),
    "llama-one-kv-head": dict(hidden_size=90, num_attention_heads=5, num_key_value_heads=1, head_dim=24),
    "llama-yarn": dict(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}, max_position_embeddings=512
    ),
    "qwen2-mixed-sliding": dict(
        use_sliding_window=True,
        sliding_window=16,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "full_attention", "full_attention"],
    ),
}


@functools.cache
def shared_model(name: str) -> PreTrainedModel:
    """The model of a family, or of a key of `SHAPES`; one object per process, so tests must detach."""
    return tiny_model(name.split("-")[0], **SHAPES.get(name, {}))


@torch.no_grad()
def step(model: PreTrainedModel, tokens: torch.Tensor, cache: AttachedCache) -> torch.Tensor:
    """Logits (t, V) of tokens (t,) on top of `cache`."""
    return model(tokens[None], use_cache=True, **{cache_keyword(model): cache}).logits[0]
