"""Slow, obvious references that share no code with the package, and queries and keys to compare them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfactory.cache.kv_cache import KVCache
from kvfactory.methods.base import RaggedKept
from kvfactory.monkeypatch import cache_keyword

ORACLE = "kvfactory_test_oracle"


def qkv(S: int = 53, Hq: int = 6, Hk: int = 2, D: int = 12, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random queries (1, Hq, S, D), keys and values (1, Hk, S, D), peaked enough that scores differ."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, h, S, D, generator=g) * 1.5 for h in (Hq, Hk, Hk))


def dense_attention(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention probabilities (B, Hq, S, S) in float64; query head h reads kv head h // G."""
    q, k = q.double(), k.double()
    B, Hq, S, _ = q.shape
    G = Hq // k.shape[1]
    out = torch.zeros(B, Hq, S, S, dtype=torch.float64)
    for b in range(B):
        for h in range(Hq):
            logits = q[b, h] @ k[b, h // G].T * scale
            for i in range(S):
                out[b, h, i, : i + 1] = torch.softmax(logits[i, : i + 1], dim=0)
    return out


def reduce_heads(scores: torch.Tensor, num_kv_heads: int, how: str) -> torch.Tensor:
    """(B, Hq, P) -> (B, Hk, P), one group of consecutive query heads after the other."""
    B, Hq, P = scores.shape
    G = Hq // num_kv_heads
    out = torch.empty(B, num_kv_heads, P, dtype=scores.dtype)
    for g in range(num_kv_heads):
        members = scores[:, g * G : (g + 1) * G]
        out[:, g] = {"mean": members.mean(1), "max": members.max(1).values, "sum": members.sum(1)}[how]
    return out


def pool(row: list[float], kernel: int, how: str) -> list[float]:
    """1-D pooling of stride 1: max over what exists, mean with zeros beyond the edges."""
    half = kernel // 2
    out = []
    for j in range(len(row)):
        near = row[max(0, j - half) : j + half + 1]
        out.append(max(near) if how == "maxpool" else sum(near) / kernel)
    return out


def best(row: list[float], count: int) -> list[int]:
    """Ascending positions of the largest values; of equal ones the lower position."""
    return sorted(sorted(range(len(row)), key=lambda j: (-row[j], j))[:count])


@contextmanager
def record_kept(cache: KVCache) -> Iterator[list[torch.Tensor | None]]:
    """Notes what each layer's `compress` returns while a prompt runs -> (B, Hq, S) bool masks, None for everything.

    Raises:
        AssertionError: the method replaces keys or values, so that no mask describes it.
    """
    masks: list[torch.Tensor | None] = []
    layers = cache.kv_layers

    def watch(cluster):
        inner = cluster.compress

        def compress(q, k, v, ctx):
            kept = inner(q, k, v, ctx)
            masks.append(None if kept is None else _as_mask(kept, q))
            assert kept is None or (kept.keys is None and kept.values is None), "keys or values are replaced"
            return kept

        return compress

    for layer in layers:
        layer.cluster.compress = watch(layer.cluster)
    try:
        yield masks
    finally:
        for layer in layers:
            del layer.cluster.compress


def _as_mask(kept, q: torch.Tensor) -> torch.Tensor:
    B, Hq, S, _ = q.shape
    if isinstance(kept, RaggedKept):
        parts = list(kept.indices.split(kept.lengths.flatten().tolist()))
        Hs = len(parts) // B
        rows = [parts[b * Hs : (b + 1) * Hs] for b in range(B)]
    else:
        rows = [list(row) for row in kept.indices]
    mask = torch.zeros(B, Hq, S, dtype=torch.bool)
    for b, row in enumerate(rows):
        G = Hq // len(row)
        for h in range(Hq):
            positions = row[h // G].tolist()
            assert positions == sorted(set(positions)) and positions[0] >= 0 and positions[-1] < S, positions
            mask[b, h, positions] = True
    return mask


def _oracle_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Stock sdpa for prompts and untouched layers; else plain attention in float32 under this layer's own 4-D mask."""
    t, n = query.shape[2], key.shape[2]
    if t == n or not hasattr(module, "oracle_keep"):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling)
    visible = torch.ones(*query.shape[:3], n, dtype=torch.bool)
    for row in range(t):
        if module.oracle_keep is not None:
            visible[:, :, row, : module.oracle_keep.shape[2]] = module.oracle_keep
        visible[:, :, row, n - t + row + 1 :] = False
    G = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(G, dim=1), value.repeat_interleave(G, dim=1)
    logits = (query @ key.transpose(2, 3)).float() * scaling
    weights = torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1).to(value.dtype)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(ORACLE, _oracle_attention)
AttentionMaskInterface.register(ORACLE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def masked_stock(model: PreTrainedModel, masks: dict[int, torch.Tensor | None]) -> Iterator[None]:
    """The stock model whose later tokens do not see dropped prompt tokens; `masks` by layer, (B, Hq, S) bool."""
    modules = {m.layer_idx: m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    before = model.config._attn_implementation
    model.set_attn_implementation(ORACLE)
    for layer, mask in masks.items():
        modules[layer].oracle_keep = mask
    try:
        yield
    finally:
        for layer in masks:
            del modules[layer].oracle_keep
        model.set_attn_implementation(before)


@torch.no_grad()
def masked_logits(
    model: PreTrainedModel, prompt: torch.Tensor, later: list[torch.Tensor], masks: dict[int, torch.Tensor | None]
) -> list[torch.Tensor]:
    """Logits (t, V) of each chunk of later tokens (t,) after `prompt` (S,), under `masked_stock`."""
    out = []
    keyword = cache_keyword(model)
    cache = DynamicCache(config=model.config)
    with masked_stock(model, masks):
        model(prompt[None], use_cache=True, logits_to_keep=1, **{keyword: cache})
        for chunk in later:
            out.append(model(chunk[None], use_cache=True, **{keyword: cache}).logits[0])
    return out
