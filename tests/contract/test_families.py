"""Every family, both granularities, both generation paths; transformers' own generate after attach."""

from __future__ import annotations

import warnings

import pytest
import torch
from contract_cases import ALL, PROMPT, attached, method_granularity, run
from tiny import random_prompt, shared_model

from kvfactory import generate
from kvfactory.cache.kv_cache import KVCache
from kvfactory.capability import FAMILIES

ODD_SHAPES = ("llama-9-heads", "llama-yarn", "qwen2-mixed-sliding")
ROWS = [random_prompt(PROMPT), random_prompt(37, seed=7), random_prompt(20, seed=8)]


def _stock(model, prompt, new, backend):
    before = model.config._attn_implementation
    model.set_attn_implementation(backend)
    ids = prompt[None]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    model.set_attn_implementation(before)
    return out


@method_granularity(ALL)
@pytest.mark.parametrize("name, backend", [*((n, "sdpa") for n in (*FAMILIES, *ODD_SHAPES)), ("llama", "eager")])
def test_paths_agree(name, method, granularity, backend):
    """Our loop, transformers' generate with our cache, and model.generate after attach give the same tokens."""
    model, prompt = shared_model(name), ROWS[0]
    with attached(model, method, kv_cache_granularity=granularity, attn_implementation=backend):
        loop = generate(model, prompt, 8, eos_token_id=[])
        assert torch.equal(loop.sequences, generate(model, prompt, 8, eos_token_id=[], decode="hf").sequences)
        plain = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        carried = plain.get("past_key_values", plain.get("cache"))
        assert isinstance(carried, KVCache) and carried.kept_tokens == loop.cache.kept_tokens
        assert carried.nbytes == loop.cache.nbytes
        stops = generate(model, prompt, 8, min_new_tokens=8, eos_token_id=2)
        assert torch.equal(plain.sequences, stops.sequences)
    if method == "FullKV":
        assert torch.equal(plain.sequences, _stock(model, prompt, 8, backend))


@method_granularity(ALL)
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2-mixed-sliding"])  # --verify batches every family
def test_rows_that_decode_together_equal_rows_alone(name, method, granularity):
    """Three prompts, one of them within the budget, that finish at different steps."""
    model = shared_model(name)
    with attached(model, method, kv_cache_granularity=granularity):
        alone = [
            generate(model, row, 9, eos_token_id=list(range(60, 70)), example_id=str(i)) for i, row in enumerate(ROWS)
        ]
        for size in (2, 3):
            batch = generate(
                model, ROWS, 9, eos_token_id=list(range(60, 70)), example_id=["0", "1", "2"], batch_size=size
            )
            for row, want in zip(batch.rows, alone, strict=True):
                assert row.near_ties or row.tokens == want.rows[0].tokens
                assert row.cache.kept_tokens == want.cache.kept_tokens
                assert row.near_ties or row.cache.nbytes == want.cache.nbytes


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stores_half_the_bytes(method, dtype):
    """Stores take the dtype of the keys they get."""
    prompt = ROWS[0]
    full = run(shared_model("llama"), method, prompt, new=1)
    from tiny import tiny_model

    model = tiny_model("llama").to(dtype)
    out = run(model, method, prompt, new=4)
    assert out.cache.kept_tokens == full.cache.kept_tokens or method == "AdaKV"
    assert all(layer.store.view()[0].dtype == dtype for layer in out.cache.kv_layers)
    assert out.rows[0].prompt_bytes.used * 2 == full.rows[0].prompt_bytes.used or method == "AdaKV"


@pytest.mark.parametrize("method", ALL)
def test_no_warning_reaches_the_user(method):
    model = shared_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attached(model, method):
            generate(model, ROWS[0], 3, eos_token_id=[])
            generate(model, ROWS, 3, min_new_tokens=1)
            generate(model, ROWS[0], 3, min_new_tokens=2, decode="hf")
