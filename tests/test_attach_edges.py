"""Ways of using an attached model that look right and must not be silently wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_model
from transformers import DynamicCache, LlamaModel, OPTConfig, OPTForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfactory import attach, detach, generate
from kvfactory.monkeypatch import ATTENTION_NAME, cache_keyword

IDS = torch.arange(3, 64)[None] % 90 + 3


@pytest.fixture
def model():
    return tiny_model("llama")


@torch.no_grad()
@pytest.mark.parametrize("returned", [False, True])
def test_the_usual_loop_over_forwards(model, returned):
    """Keeping the cache that was passed in works as keeping the one that is returned."""
    keyword = cache_keyword(model)
    attach(model, "snapkv", max_capacity_prompt=24)
    want = generate(model, IDS[0], 6, eos_token_id=[]).rows[0].tokens
    cache, ids, got = DynamicCache(config=model.config), IDS, []
    for _ in range(6):
        out = model(ids, **{keyword: cache})
        cache = getattr(out, keyword) if returned else cache
        ids = out.logits[:, -1:].argmax(-1)
        got.append(int(ids))
    assert got == want


@torch.no_grad()
def test_a_cache_outlives_no_method(model):
    keyword = cache_keyword(model)
    attach(model, "snapkv", max_capacity_prompt=24)
    kept = getattr(model(IDS, **{keyword: DynamicCache(config=model.config)}), keyword)
    detach(model)
    with pytest.raises(ValueError, match="no longer attached"):
        model(IDS[:, :1], **{keyword: kept})
    attach(model, "h2o", max_capacity_prompt=24)
    with pytest.raises(ValueError, match="another attachment"):
        model(IDS[:, :1], **{keyword: kept})


def test_models_that_share_a_config_object(model):
    other = type(model)(model.config)
    attach(model, "snapkv", max_capacity_prompt=24)
    for attempt in (lambda: other(IDS), lambda: attach(other, "h2o")):
        with pytest.raises(ValueError, match="shares its config object"):
            attempt()
    detach(model)
    other(IDS)


def test_a_refused_attach_leaves_nothing_behind(model):
    body = LlamaModel(copy.deepcopy(model.config))
    before = body.config._attn_implementation
    with pytest.raises(ValueError, match="LlamaModel does not generate text"):
        attach(body, "snapkv")
    assert body.config._attn_implementation == before and not body._forward_pre_hooks
    config = OPTConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, ffn_dim=32, vocab_size=99)
    with pytest.raises(ValueError, match="does not say how many key-value heads"):
        attach(OPTForCausalLM(config), "snapkv")


@pytest.mark.parametrize("method", ["l2norm", "snapkv", "h2o"])
def test_double_precision(model, method):
    attach(model.double(), method, max_capacity_prompt=24)
    assert len(generate(model, IDS[0], 3, eos_token_id=[]).rows[0].tokens) == 3


def test_an_attention_function_wrapped_as_kvpress_wraps_all_of_them(model):
    """Importing kvpress puts a wrapper with this signature around every function that is registered then."""
    attach(model, "adakv", max_capacity_prompt=24)
    want = generate(model, IDS[0], 6, eos_token_id=[]).rows[0].tokens
    calls, inner = [], ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]

    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        calls.append(module)
        return inner(module, query, key, value, attention_mask, dropout, **kwargs)

    ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = wrapper
    try:
        got = generate(model, IDS[0], 6, eos_token_id=[]).rows[0].tokens
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]  # what is registered for all models shows again
    assert calls and got == want
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is inner
