"""Layers on several devices and modules that accelerate has hooked: same tokens, kept tokens and bytes.

Two stand-ins for GPUs run on the CPU. Weights that accelerate keeps on the disk: the hooks are those of a GPU split and
the figures are real. Fake tensors of torch: no figures, but every operation across two devices is an error, as on GPUs.
"""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from in_process import Runner
from tiny import random_prompt, tiny_config, tiny_model
from tiny_checkpoint import save_checkpoint, write_dataset
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from kvfactory import attach, detach, generate, runner
from kvfactory.cache.batch import FanOutCache
from kvfactory.device_map import spread, whole_parts
from kvfactory.graph_support import graph_obstacle
from kvfactory.loop_engine import forward
from kvfactory.methods import METHODS
from kvfactory.model_parts import input_device
from kvfactory.monkeypatch import attach_plan, get_attachment, replace_llama, restore
from kvfactory.plan import Plan, make_plan
from kvfactory.runner import merge

PROMPTS = [random_prompt(61, seed=1), random_prompt(90, seed=2)]
DATA_DEPENDENT = {"AdaKV", "HeadKV"}  # their sizes follow from values, which fake tensors do not have
GENERATOR = {"NACL"}  # fake tensors refuse its draw from a generator of its own


def settings_of(method):
    """`uniform` are scores that HeadKV has for every model."""
    return {"head_path": "uniform"} if method == "HeadKV" else {}


def plan_of(method: str) -> Plan:
    return make_plan(method, max_capacity_prompt=24, kv_cache_granularity="kv_head", **settings_of(method))


def figures(model, method=None, prompts=PROMPTS[:1], **how):
    """Tokens, kept tokens and bytes; attaches and detaches unless `method` is None."""
    if method is not None:
        attach_plan(model, plan_of(method), "sdpa")
    out = generate(model, prompts, 6, eos_token_id=[], example_id="x", **how)
    if method is not None:
        detach(model)
    caches = [row.cache for row in out.rows]
    return [s.tolist() for s in out.sequences], [c.kept_tokens for c in caches], [c.nbytes for c in caches]


@torch.no_grad()
def stock(model):
    return model(PROMPTS[0][None]).logits


@pytest.mark.parametrize("method", METHODS.names())
def test_a_hooked_attention_is_not_missed(method):
    model = tiny_model("llama")
    before, want = stock(model), figures(model, method)
    layer = model.model.layers[0].self_attn
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert figures(model, method) == want  # hooked before
    assert torch.equal(stock(model), before)
    remove_hook_from_module(layer)
    attach_plan(model, plan_of(method), "sdpa")
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    assert figures(model) == want  # hooked after
    detach(model)
    assert hasattr(layer, "_hf_hook") and not hasattr(layer, "kv_slot")
    assert torch.equal(stock(model), before)


@pytest.fixture
def on_disk(tmp_path):
    """Embedding, a layer in the middle and the head on the disk, each loaded by its hook when it runs."""
    model = tiny_model("llama")
    places = dict.fromkeys(whole_parts(model), "cpu")
    places |= dict.fromkeys(("model.embed_tokens", "model.layers.1", "lm_head"), "disk")
    dispatch_model(model, places, offload_dir=tmp_path / "weights")
    assert model.device.type == "meta"
    return model


@pytest.mark.parametrize("method", METHODS.names())
def test_weights_that_accelerate_keeps_elsewhere(method, on_disk):
    model = tiny_model("llama")
    assert input_device(on_disk) == torch.device("cpu")
    before = stock(on_disk)
    for prompts in (PROMPTS[:1], PROMPTS):
        assert figures(on_disk, method, prompts) == figures(model, method, prompts)
    assert figures(on_disk, method, decode="hf") == figures(model, method, decode="hf")
    assert torch.equal(stock(on_disk), before)


def test_the_graph_gives_way_with_its_reason(on_disk, monkeypatch):
    monkeypatch.setattr("kvfactory.graph_support.why_torch", lambda device: None)
    cuda = torch.device("cuda")
    for model, reason in ((on_disk, "the model lies on several devices"), (tiny_model("llama"), None)):
        attachment = attach(model, "snapkv", max_capacity_prompt=24)
        assert graph_obstacle(attachment, attachment.plan, cuda, torch.float32) == reason
        detach(model)
    model = tiny_model("llama")
    model.lm_head.to("meta")  # shared out by hand, without a map
    attachment = attach(model, "snapkv", max_capacity_prompt=24)
    assert graph_obstacle(attachment, attachment.plan, cuda, torch.float32) == "the model lies on several devices"
    detach(model)


def test_the_embeddings_hook_says_where_ids_enter():
    model = tiny_model("llama")
    assert input_device(model) == torch.device("cpu")
    embedding = model.get_input_embeddings()
    embedding._hf_hook = SequentialHook(AlignDevicesHook(), AlignDevicesHook(execution_device=1))
    assert input_device(model) == torch.device("cuda", 1)
    embedding._hf_hook = AlignDevicesHook(execution_device="cuda:2")
    assert input_device(model) == torch.device("cuda", 2)


def test_frequencies_are_those_of_the_loaded_model(tmp_path):
    """`replace_llama` attaches while the model has no weights yet, so nothing may be kept from then."""
    folder = save_checkpoint(tmp_path / "tiny")
    options = {"max_capacity_prompt": 24, "reindex_positions": True}
    model = AutoModelForCausalLM.from_pretrained(folder)
    attach(model, "streamingllm", **options)
    want = generate(model, PROMPTS[0], 6, eos_token_id=[]).sequences
    replace_llama("streamingllm", **options)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(generate(model, PROMPTS[0], 6, eos_token_id=[]).sequences, want)
    finally:
        restore()


# --- two devices of fake tensors -------------------------------------------------------------------------------------

DEVICES = ("lazy:0", "lazy:1")  # a type of which torch knows nothing, so that neither is taken for the host


@pytest.fixture
def two_devices(monkeypatch):
    """A model of four layers, two on each device, within the fake mode that must be on."""
    monkeypatch.setattr(torch, "autocast", lambda **_: nullcontext())  # knows no such device; older models ask for it
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate looks at addresses, which are not real here
        config = tiny_config("llama", num_hidden_layers=4)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        places = {part: DEVICES[i] for part, i in spread(model, [1, 1]).items()}
        for part, device in places.items():
            for module in model.get_submodule(part).modules():
                for name, tensor in list(module.named_parameters(recurse=False)):
                    module._parameters[name] = torch.nn.Parameter(tensor.detach().to(device), requires_grad=False)
                for name, tensor in list(module.named_buffers(recurse=False)):
                    module._buffers[name] = tensor.to(device)
        dispatch_model(model, places, main_device=DEVICES[0])
        yield model


def ids(count):
    return torch.zeros(1, count, dtype=torch.long).to(DEVICES[0])


def decode(model, cache, steps=3):
    for step in range(steps):
        logits = forward(model, ids(1), cache, torch.full((1, 1), 80 + step).to(DEVICES[0]))
        assert str(logits.device) == DEVICES[0]


def store_devices(cache):
    return [str(buffer.device) for layer in cache.kv_layers for buffer in layer.store.buffers]


WHERE = [DEVICES[0]] * 4 + [DEVICES[1]] * 4


@pytest.mark.parametrize("method", [m for m in METHODS.names() if m not in DATA_DEPENDENT | GENERATOR])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
def test_everything_of_a_layer_is_on_its_device(two_devices, method, granularity):
    plan = make_plan(method, max_capacity_prompt=24, kv_cache_granularity=granularity)
    attachment = attach_plan(two_devices, plan, "sdpa")
    attachment.record_positions = True
    cache = attachment.new_cache(max_new_tokens=2)
    forward(two_devices, ids(80), cache)
    decode(two_devices, cache)
    assert store_devices(cache) == WHERE
    for i, layer in enumerate(cache.kv_layers):
        held = [layer.store.positions, *getattr(layer.store, "columns", {}).values()]
        assert all(str(x.device) == WHERE[2 * i] for x in held if x is not None)
    one = 2 * 2 * 16 * 4  # keys and values of one token at two kv heads, float32
    assert cache.full_bytes() == 4 * 83 * one


@pytest.mark.parametrize(
    "method, more",
    [
        ("streamingllm", {"reindex_positions": True}),
        ("streamingllm", {"reindex_positions": True, "decode_evict": True}),
        ("h2o", {"decode_evict": True}),
        ("scissorhands", {"decode_evict": True}),
        ("snapkv", {"merge": "pivot"}),
        ("snapkv", {"merge": "weighted"}),
    ],
)
def test_settings_that_move_tokens_stay_on_the_layers_device(two_devices, method, more):
    attach(two_devices, method, max_capacity_prompt=24, kv_cache_granularity="kv_head", **more)
    cache = get_attachment(two_devices).new_cache(max_new_tokens=4)
    forward(two_devices, ids(80), cache)
    decode(two_devices, cache)
    assert store_devices(cache) == WHERE


def test_one_prompt_for_several_methods(two_devices):
    attachment = attach(two_devices, "fullkv")
    plans = [make_plan(m, max_capacity_prompt=24) for m in ("snapkv", "h2o", "streamingllm")]
    caches = [attachment.new_cache(plan, max_new_tokens=4) for plan in plans]
    fan = FanOutCache(attachment, caches)
    forward(two_devices, ids(80), fan)
    assert not fan.failures
    for cache in caches:
        decode(two_devices, cache)
        assert store_devices(cache) == WHERE


def test_a_foreign_device_is_noticed(two_devices):
    """The stand-in itself: a store that lay on the first device would fail."""
    attach(two_devices, "snapkv", max_capacity_prompt=24)
    cache = get_attachment(two_devices).new_cache(max_new_tokens=4)
    forward(two_devices, ids(80), cache)
    store = cache.kv_layers[3].store
    store._k = store._k.to(DEVICES[0])
    with pytest.raises(Exception, match="lazy:0"):
        decode(two_devices, cache, 1)


# --- peaks by device -------------------------------------------------------------------------------------------------


def test_peaks_by_device_are_the_most_of_any_row_and_of_any_shard(tmp_path, monkeypatch):
    model = save_checkpoint(tmp_path / "model" / "tiny")
    write_dataset(tmp_path / "data", "hotpotqa", 4)
    run = Runner(model, tmp_path / "data", tmp_path / "out")
    peaks = iter([(5, 9), (7, 3), (1, 2), (6, 8)])
    monkeypatch.setattr(
        runner, "peaks_by_device", lambda model: dict(zip(("cuda:0", "cuda:1"), next(peaks), strict=True))
    )
    argv = ("--method", "snapkv", "--datasets", "hotpotqa", "--num_shards", 2)
    assert run(*argv, "--shard_id", 0) == 0
    assert [row["peak_mem_bytes"] for row in run.rows()] == [14, 10]
    counts = run.record()["counts"]["hotpotqa"]
    assert (counts["peak_mem_bytes_cuda:0"], counts["peak_mem_bytes_cuda:1"]) == (7, 9)
    assert run(*argv, "--shard_id", 1) == 0
    run.last = run.job(*argv, "--merge_shards")
    assert merge(run.last) == 0
    counts = run.record()["counts"]["hotpotqa"]
    assert counts["done"] == 4 and (counts["peak_mem_bytes_cuda:0"], counts["peak_mem_bytes_cuda:1"]) == (7, 9)
    assert json.dumps(counts).count("peak_mem_bytes") == 2
