"""Tiny random models of every supported family, built from a config: for `--list_methods --verify` and the tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 97


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Three layers, 6 query heads on 2 kv heads of 16 channels, no sliding window, 97 words.

    Args:
        family: one of `kvfactory.capability.FAMILIES`.
        changes: config fields that differ.
    """
    fields: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Peaked enough that dropping tokens moves the logits: at the usual 0.02 attention is flat and any cache passes.
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family != "phi3":
        fields["head_dim"] = 16
    if family in ("mistral", "mixtral"):
        fields["sliding_window"] = None
    if family == "mixtral":
        fields |= dict(num_local_experts=3, num_experts_per_tok=2)
    return AutoConfig.for_model(family, **(fields | changes))


def tiny_model(family: str, *, seed: int = 0, backend: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A float32 model of `tiny_config` on the CPU with weights drawn from `seed`; the global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), attn_implementation=backend).float()
        with torch.no_grad():
            # Norm weights start at one and biases at zero, which hides them; with unit weights all keys of a model with
            # key norms have the same length, and a ranking by length would be decided by rounding.
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.copy_(torch.rand_like(weight) + (-0.5 if name.endswith("bias") else 0.5))
    return model.eval()


def random_prompt(length: int, seed: int = 0) -> torch.Tensor:
    """(length,) token ids without the special ones."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
