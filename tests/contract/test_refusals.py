"""What cannot work is refused in one sentence, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from contract_cases import ALL, BUDGET, PROMPT, attached, capability, options
from tiny import random_prompt, shared_model, tiny_model
from transformers import DynamicCache, StaticCache

from kvfactory import attach, generate
from kvfactory.generation import generate as library_generate
from kvfactory.monkeypatch import cache_keyword, get_attachment

ACTING = [m for m in ALL if capability(m).stage != "none"]
IDS = random_prompt(PROMPT)[None]
GENERATE = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)


def _padded():
    """Two rows, the second with 9 padding tokens on the left, and their mask."""
    ids = torch.stack([random_prompt(40, seed=1), random_prompt(40, seed=2)])
    mask = torch.ones_like(ids)
    ids[1, :9], mask[1, :9] = 0, 0
    return ids, mask


@pytest.mark.parametrize("method", ACTING)
def test_padded_batch_is_refused(method):
    ids, mask = _padded()
    model = shared_model("llama")
    with attached(model, method), pytest.raises(ValueError, match=f"{method} would score padding tokens"):
        model.generate(ids, attention_mask=mask, **GENERATE)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "qwen2-mixed-sliding"])
def test_padded_batch_of_fullkv_equals_stock(backend, name):
    ids, mask = _padded()
    model = shared_model(name)
    model.set_attn_implementation(backend)
    flags = GENERATE | dict(max_new_tokens=9, min_new_tokens=9)
    want = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **flags)
    with attached(model, "FullKV"):
        got = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **flags)
    model.set_attn_implementation("sdpa")
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # logits of magnitude 10 in float32


@pytest.mark.parametrize("method", ALL)
def test_an_unpadded_batch_equals_its_rows(method):
    """Rows of one length need no padding; a randomised method draws for the batch, so its rows are its own."""
    if capability(method).randomised:
        pytest.skip("draws are made per example, which a plain tensor does not name")
    model = shared_model("llama")
    ids = torch.stack([random_prompt(40, seed=1), random_prompt(40, seed=2)])
    flags = GENERATE | dict(min_new_tokens=4)
    with attached(model, method):
        both = model.generate(ids, attention_mask=torch.ones_like(ids), **flags)
        alone = [model.generate(row[None], attention_mask=torch.ones_like(row[None]), **flags) for row in ids]
    assert torch.equal(both, torch.cat(alone))


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(
    "flags",
    [dict(num_beams=2), dict(prompt_lookup_num_tokens=2), dict(cache_implementation="static")],
    ids=["beams", "assisted", "static"],
)
def test_other_decoding_is_refused(method, flags):
    model = tiny_model("llama")  # transformers 4.57 keeps a static cache that failed on the model
    with attached(model, method), pytest.raises(ValueError):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), **GENERATE, **flags)


@pytest.mark.parametrize("method", ACTING)
def test_a_prompt_in_chunks_is_refused(method):
    """The first chunk would be compressed alone, and the result would not be the method's."""
    model = shared_model("llama")
    with attached(model, method), pytest.raises(ValueError, match="prefill_chunk_size"):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), prefill_chunk_size=16, **GENERATE)


@pytest.mark.parametrize("method", ALL)
def test_foreign_caches_are_refused(method):
    model = shared_model("llama")
    keyword = cache_keyword(model)
    with torch.no_grad():
        filled = model(IDS, use_cache=True, **{keyword: DynamicCache(config=model.config)})
        filled = filled.get("past_key_values", filled.get("cache"))
        other = tiny_model("llama")
        theirs = attach(other, method, **options(method)).new_cache()
        with attached(model, method):
            with pytest.raises(ValueError, match="DynamicCache with 61 tokens was filled without"):
                model(IDS[:, :1], **{keyword: filled})
            with pytest.raises(ValueError, match="made by another attachment"):
                model(IDS, **{keyword: theirs})
            with pytest.raises(ValueError, match="StaticCache"):
                model(IDS, **{keyword: StaticCache(config=model.config, max_cache_len=80)})


@pytest.mark.parametrize("method", ALL)
def test_attention_weights_are_refused(method):
    model = shared_model("llama")
    with attached(model, method), pytest.raises(ValueError, match="output_attentions"):
        model(IDS, output_attentions=True)


@pytest.mark.parametrize("method", ALL)
def test_a_model_whose_layers_all_slide(method):
    """Nothing to compress beyond the window: acting methods are refused, FullKV gives the stock model."""
    model = tiny_model("mistral", sliding_window=16)
    want = model.generate(IDS, attention_mask=torch.ones_like(IDS), **GENERATE)
    if method in ACTING:
        with pytest.raises(ValueError, match=f"{method} has nothing to compress: all 3 layers"):
            attach(model, method, **options(method))
        assert get_attachment(model) is None and model.config._attn_implementation == "sdpa"
    else:
        with attached(model, method):
            assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **GENERATE), want)
            assert torch.equal(generate(model, IDS, 4).sequences, want)
    assert torch.equal(model.generate(IDS, attention_mask=torch.ones_like(IDS), **GENERATE), want)


@pytest.mark.parametrize("method", ALL)
def test_bad_options_leave_the_model_alone(method):
    model = shared_model("llama")
    for bad, word in (
        (dict(max_capacity_prompt=0), "max_capacity_prompts"),
        (dict(max_capacity_prompt=BUDGET, max_capacity_prompt_ratio=0.5), "exactly one"),
        (dict(kv_cache_granularity="head"), "kv_cache_granularity"),
        (dict(gqa_score_agg="median"), "gqa_score_agg"),
        (dict(attn_implementation="flash"), "attn_implementation"),
        (dict(no_such_setting=3), "no_such_setting"),
        (dict(preset="mine"), "preset"),
    ):
        with pytest.raises(ValueError, match=word):
            attach(model, method, **(options(method) | bad))
        assert get_attachment(model) is None and model.config._attn_implementation == "sdpa"


def test_an_unknown_method_gets_near_matches():
    with pytest.raises(ValueError, match="Did you mean .*SnapKV"):
        attach(shared_model("llama"), "snapk")


def test_a_model_off_the_attention_interface_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match="Bloom"):
        attach(model, "SnapKV", max_capacity_prompt=24)
    assert get_attachment(model) is None


def test_the_same_function_is_exported():
    assert generate is library_generate
