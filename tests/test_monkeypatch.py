"""replace_* before loading, restore, and what a user's own calls meet; the contract suite covers attach and detach."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from tiny import random_prompt, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MistralForCausalLM

from kvfactory import attach, detach, generate
from kvfactory.cache.kv_cache import KVCache
from kvfactory.capability import FAMILIES
from kvfactory.monkeypatch import cache_keyword, get_attachment, replace_llama, replace_mistral, replace_model, restore

IDS = random_prompt(61)[None]
FLAGS = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.fixture(autouse=True)
def _restored():
    yield
    restore()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(folder / family)
    return folder


def load(folder, family="llama", **more):
    return AutoModelForCausalLM.from_pretrained(folder / family, **more)


def run(model):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), return_dict_in_generate=True, **FLAGS)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_replace_before_loading_then_generate(checkpoints, backend):
    stock = load(checkpoints, attn_implementation=backend)
    want = run(stock).sequences
    replace_llama(
        "snapkv",
        max_capacity_prompt=24,
        window_size=8,
        kernel_size=7,
        pooling="maxpool",
        kv_cache_granularity="kv_head",
    )
    model = load(checkpoints, attn_implementation=backend)
    out = run(model)
    cache = out.get("past_key_values", out.get("cache"))
    assert isinstance(cache, KVCache) and cache.kept_tokens == [[24, 24]] * 3
    ours = generate(model, IDS[0], 5, min_new_tokens=5)
    assert torch.equal(out.sequences, ours.sequences)
    assert get_attachment(model).backend_name == backend
    restore()
    assert get_attachment(model) is None and torch.equal(run(model).sequences, want)
    assert get_attachment(load(checkpoints)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_replace_model_reaches_every_family_and_restore_undoes_it(checkpoints, family):
    replace_model("streamingllm", max_capacity_prompt=24)
    model = load(checkpoints, family)
    cache = run(model).get("past_key_values")
    assert {n for layer in (cache or run(model)["cache"]).kept_tokens for n in layer} == {24}
    restore()
    assert get_attachment(model) is None and get_attachment(load(checkpoints, family)) is None


def own_names(cls: type) -> set[str]:
    """Without what transformers itself notes on a class the first time it is asked."""
    return {name for name in vars(cls) if not name.endswith("_cached_value")}


def test_classes_are_left_as_they_were():
    inits = [cls.__init__ for cls in (LlamaForCausalLM, MistralForCausalLM)]
    names = [own_names(cls) for cls in (LlamaForCausalLM, MistralForCausalLM)]
    replace_llama("fullkv")
    replace_mistral("snapkv", max_capacity_prompt=24)
    assert get_attachment(LlamaForCausalLM(tiny_config("llama"))).plan.method == "FullKV"
    assert get_attachment(MistralForCausalLM(tiny_config("mistral"))).plan.method == "SnapKV"
    replace_llama("h2o", max_capacity_prompt=24)  # the later call wins, once
    assert get_attachment(LlamaForCausalLM(tiny_config("llama"))).plan.method == "H2O"
    restore()
    assert [cls.__init__ for cls in (LlamaForCausalLM, MistralForCausalLM)] == inits
    assert [own_names(cls) for cls in (LlamaForCausalLM, MistralForCausalLM)] == names
    restore()  # nothing left to undo


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: replace_llama("snapk"), "Did you mean"),
        (lambda: replace_llama("snapkv", max_capacity_prompt=3), "max_capacity_prompts 3"),
        (lambda: replace_model("snapkv", ["llama", "bert"]), "unknown model family 'bert'"),
    ],
)
def test_bad_calls_replace_nothing(call, word):
    before = LlamaForCausalLM.__init__
    with pytest.raises(ValueError, match=word):
        call()
    assert LlamaForCausalLM.__init__ is before


def test_an_attached_model_is_freed():
    model = tiny_model("llama")
    attach(model, "snapkv", max_capacity_prompt=24)
    generate(model, IDS[0], 3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_saving_an_attached_model_gives_a_stock_checkpoint(tmp_path):
    model = tiny_model("llama")
    want = model(IDS).logits
    attach(model, "snapkv", max_capacity_prompt=24)
    model.save_pretrained(tmp_path)
    assert "kvfactory" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, want)


def test_positional_and_keyword_caches_are_both_taken_over():
    """A cache passed by position, in the place that forward gives it."""
    import inspect

    model = tiny_model("llama")
    attach(model, "snapkv", max_capacity_prompt=24)
    from transformers import DynamicCache

    names = list(inspect.signature(model.forward).parameters)
    before = names.index(cache_keyword(model))
    with torch.no_grad():
        by_place = model(IDS, *[None] * (before - 1), DynamicCache(config=model.config))
        by_name = model(IDS, **{cache_keyword(model): DynamicCache(config=model.config)})
    for out in (by_place, by_name):
        assert isinstance(out.get("past_key_values", out.get("cache")), KVCache)


def test_a_bytes_budget_is_solved_per_prompt_and_method():
    """The stored bytes are at most the share asked for, and one more token would exceed it."""
    model = tiny_model("llama")
    for method, granularity in (("snapkv", "kv_head"), ("snapkv", "query_head"), ("l2norm", "kv_head")):
        attach(model, method, budget_bytes=85, kv_cache_granularity=granularity)
        cache = generate(model, IDS[0], 1).cache
        used, full = cache.bytes().used, cache.full_bytes()
        heads = sum(len(layer) for layer in cache.kept_tokens if layer[0] < 61)
        assert used <= 0.85 * full < used + heads * 2 * 16 * 4
        detach(model)


def test_a_ratio_budget_follows_each_prompt():
    model = tiny_model("llama")
    attach(model, "streamingllm", max_capacity_prompt_ratio=0.5)
    for length in (61, 37, 90):
        assert generate(model, random_prompt(length), 1).cache.kept_tokens == [[round(length * 0.5)] * 2] * 3
    with pytest.raises(ValueError, match="ratio 0.5 keeps 4 of 8 prompt tokens"):
        generate(model, random_prompt(8), 1)
    detach(model)


SCRIPT = """
import warnings
warnings.simplefilter("error", DeprecationWarning); warnings.simplefilter("error", FutureWarning)
import logging, io
stream = io.StringIO(); logging.getLogger("transformers").addHandler(logging.StreamHandler(stream))
import torch
from kvfactory import attach, generate
from kvfactory.tiny_models import tiny_model, random_prompt
model = tiny_model("llama")
attach(model, "snapkv", max_capacity_prompt=24)
ids = random_prompt(61)
generate(model, ids, 3, min_new_tokens=3)
generate(model, [ids, ids[:40]], 3, min_new_tokens=3)
generate(model, ids, 3, min_new_tokens=3, decode="hf")
assert "deprecat" not in stream.getvalue().lower(), stream.getvalue()
"""


def test_no_deprecation_reaches_the_user_in_a_fresh_process():
    """transformers tells each deprecation once per process, so only a fresh one shows them all."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "deprecat" not in done.stderr.lower()
