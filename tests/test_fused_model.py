"""Fused operations on live models: what is recognised, whose forward runs when, and that nothing is left behind.

The kernels are stood in for by their torch definitions, which count their calls: fused outputs then have the stock
model's bits, in any dtype. The kernels themselves inside models: tests/kernels/model_ops_cases.py.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from tiny import random_prompt, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvfactory import attach, detach, fused_model, generate
from kvfactory.capability import FAMILIES
from kvfactory.fused_model import KINDS, fuse, obstacle
from kvfactory.kernels import model_reference

CPU = torch.device("cpu")
PROMPT = random_prompt(9)[None]


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Calls of each operation."""
    counted: Counter[str] = Counter()

    def counting(name):
        def call(*args, **kwargs):
            counted[name] += 1
            return getattr(model_reference, name)(*args, **kwargs)

        return call

    names = ("rms_norm", "swiglu", "rotate_queries_and_keys")
    standing_in = SimpleNamespace(MAX_NORM_SIZE=16384, **{name: counting(name) for name in names})
    monkeypatch.setitem(sys.modules, "kvfactory.kernels.model_ops", standing_in)
    monkeypatch.setattr(fused_model, "why_torch", lambda device: None)
    return counted


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


def used(calls, model):
    """Operations called by one forward, and its logits."""
    calls.clear()
    out = logits(model)
    return (calls["rms_norm"], calls["swiglu"], calls["rotate_queries_and_keys"]), out


def instance_attributes(model):
    return {name: set(module.__dict__) for name, module in model.named_modules()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_fused_and_taken_apart_again(family, dtype, calls):
    model = tiny_model(family).to(dtype)
    before, stock = instance_attributes(model), logits(model)
    norms = 13 if family == "qwen3" else 7  # those of heads too
    gates = 0 if family == "mixtral" else 3  # experts are no gated MLP with projections of its own
    fused = fuse(model)
    assert fused.counts == {"RMSNorm": norms, "SwiGLU": gates, "RoPE": 3}
    assert str(fused) == f"fused: {norms} RMSNorm, {gates} SwiGLU, 3 RoPE"
    operations, out = used(calls, model)
    assert operations == (norms, gates, 3) and torch.equal(out, stock)
    fused.remove()
    fused.remove()
    assert instance_attributes(model) == before
    operations, out = used(calls, model)
    assert operations == (0, 0, 0) and torch.equal(out, stock)


@pytest.mark.parametrize(
    "kinds, operations", [(("SwiGLU",), (0, 3, 0)), (("RMSNorm", "RoPE"), (7, 0, 3)), ((), (0, 0, 0))]
)
def test_kinds_are_chosen(kinds, operations, calls):
    model = tiny_model("llama")
    fused = fuse(model, kinds)
    assert used(calls, model)[0] == operations and set(fused.counts) == set(KINDS)
    fused.remove()


def test_gemma_is_left_alone_but_for_its_rotation(calls):
    """Its norms multiply by 1 + weight in float32 and its gate is a GELU."""
    config = AutoConfig.for_model(
        "gemma", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().eval()
    stock = logits(model)
    assert fuse(model).counts == {"RMSNorm": 0, "SwiGLU": 0, "RoPE": 2}
    assert torch.equal(logits(model), stock)


class OnePlusWeight(nn.Module):
    """A norm of Gemma's form under the attribute names of Llama's."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(size)), 1e-6

    def forward(self, x):
        return (model_reference.rms_norm(x.float(), 1 + self.weight.float(), self.variance_epsilon)).to(x.dtype)


class InterleavedRotation(nn.Module):
    """An attention module whose family pairs neighbouring channels."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.weight = 16, nn.Parameter(torch.rand(2))

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


def apply_rotary_pos_emb(q, k, cos, sin):
    def turn(x):
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) * sin

    return turn(q), turn(k)


def with_part(**parts):
    model = tiny_model("llama")
    for name, part in parts.items():
        setattr(model.model, name, part)
    return model


def test_lookalikes_are_told_by_what_they_compute():
    gelu = tiny_model("llama", hidden_act="gelu")
    assert fuse(gelu).counts == {"RMSNorm": 7, "SwiGLU": 0, "RoPE": 3}
    gelu = tiny_model("phi3", hidden_act="gelu")
    assert fuse(gelu).counts == {"RMSNorm": 7, "SwiGLU": 0, "RoPE": 3}
    assert fuse(with_part(other=OnePlusWeight(96))).counts["RMSNorm"] == 7
    assert fuse(with_part(other=InterleavedRotation())).counts["RoPE"] == 3


def test_partial_rotations_keep_the_familys_function(calls):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    model = tiny_model("phi3", partial_rotary_factor=0.5, rope_parameters=rope)
    stock = logits(model)
    assert model.model.rotary_emb.inv_freq.numel() == 4
    fused = fuse(model)
    operations, out = used(calls, model)
    assert operations == (7, 3, 0) and torch.equal(out, stock)
    fused.remove()


def test_weights_of_another_dtype_and_foreign_forwards_are_left_alone():
    model = tiny_model("llama").bfloat16()
    model.model.norm.float()
    layers = model.model.layers
    foreign = [layers[0].mlp, layers[1].self_attn, layers[2].input_layernorm]
    held = [partial(type(module).forward, module) for module in foreign]  # right, but somebody else's
    for module, forward in zip(foreign, held, strict=True):
        module.forward = forward
    fused = fuse(model)
    assert fused.counts == {"RMSNorm": 5, "SwiGLU": 2, "RoPE": 2}
    fused.remove()
    assert [module.forward for module in foreign] == held


def hook_all(model):
    for module in model.modules():
        if not list(module.children()) or type(module).__name__.endswith(("MLP", "Attention")):
            add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True))


def unhook_all(model):
    for module in model.modules():
        remove_hook_from_module(module)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(
    "order",
    [
        "hook fuse unfuse unhook",
        "hook fuse unhook unfuse",
        "fuse hook unfuse unhook",
        "fuse hook unhook unfuse",
        "hook unhook fuse unfuse",
        "fuse unfuse hook unhook",
        "hook fuse hook unfuse unhook",
    ],
)
def test_hooks_of_accelerate_come_and_go_in_any_order(order, family, calls):
    model = tiny_model(family)
    stock, is_fused, hooked, fused = logits(model), False, False, None
    for act in order.split():
        if act == "hook":
            hook_all(model)
        elif act == "unhook":
            unhook_all(model)
        elif act == "fuse":
            fused = fuse(model)
        else:
            fused.remove()
        is_fused = {"fuse": True, "unfuse": False}.get(act, is_fused)
        hooked = {"hook": True, "unhook": False}.get(act, hooked)
        operations, out = used(calls, model)
        assert operations == ((7, 3, 3) if is_fused else (0, 0, 0)) and torch.equal(out, stock), act
        assert hasattr(model.model.norm, "_hf_hook") == hooked
    for module in model.modules():
        for place in ("forward", "_old_forward"):
            assert not isinstance(module.__dict__.get(place), fused_model.FusedForward)


def test_who_still_holds_a_removed_forward_gets_the_stock_one(calls):
    model = tiny_model("llama")
    stock, fused = logits(model), fuse(model)
    norm = model.model.norm
    held = norm.forward
    norm.forward = lambda x: held(x)  # a wrapper that cannot be looked into
    fused.remove()
    operations, out = used(calls, model)
    assert operations == (0, 0, 0) and torch.equal(out, stock)


def test_gradients_are_those_of_the_stock_model(calls):
    model = tiny_model("llama")
    model(PROMPT).logits.sum().backward()
    want = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    fuse(model)
    calls.clear()
    model(PROMPT).logits.sum().backward()
    assert not calls
    for name, x in model.named_parameters():
        assert torch.equal(x.grad, want[name])


def test_a_model_that_changes_its_dtype_runs_its_own_forwards(calls):
    model = tiny_model("llama").bfloat16()
    fuse(model)
    model.float()
    assert used(calls, model)[0] == (0, 0, 0)
    model.bfloat16()
    assert used(calls, model)[0] == (7, 3, 3)


def test_a_deep_copy_computes_with_its_own_weights():
    model = tiny_model("qwen3")
    fused = fuse(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fused.remove()
    assert torch.equal(logits(twin), logits(tiny_model("qwen3")))


def test_outputs_that_a_hook_keeps_are_not_written_over():
    model, kept = tiny_model("llama"), []
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.register_forward_hook(lambda module, args, out: kept.append(out))
    logits(model)
    fuse(model)
    kept[1:] = []
    logits(model)
    assert torch.equal(kept[0], kept[1])


@torch.no_grad()
def test_the_gate_is_written_over_where_nobody_keeps_it(monkeypatch):
    model, seen = tiny_model("llama"), []
    fuse(model)
    ops = sys.modules["kvfactory.kernels.model_ops"]
    swiglu = ops.swiglu
    monkeypatch.setattr(ops, "swiglu", lambda gate, up, out=None: seen.append(out is gate) or swiglu(gate, up, out=out))
    logits(model)
    assert seen == [True] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_method_on_a_fused_model_generates_the_same(family, calls):
    model = tiny_model(family)
    options = dict(max_capacity_prompt=24, window_size=4, kv_cache_granularity="kv_head")
    prompt = random_prompt(40)
    attach(model, "snapkv", **options)
    stock = generate(model, prompt, max_new_tokens=5, eos_token_id=[])
    fused = fuse(model)
    calls.clear()
    out = generate(model, prompt, max_new_tokens=5, eos_token_id=[])
    assert calls["rotate_queries_and_keys"] == 3 * 5
    assert torch.equal(out.sequences, stock.sequences) and out.cache.nbytes == stock.cache.nbytes
    fused.remove()
    detach(model)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_caches_former_name_reaches_the_stock_forward():
    """Decorators that translate it stand in front of the stock forward only; dropped, the cache would stay empty."""
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    rebound = fused_model._Rotations().recognise(attention, CPU, torch.float32)
    names = ("cache", "past_key_values", "past_key_value")
    seen = []
    cache = SimpleNamespace(update=lambda k, v, *args, **kwargs: seen.append(k) or (k, v))
    hidden = torch.rand(1, 3, 96)
    angles = model.model.rotary_emb(hidden, torch.arange(3)[None])
    current = next(
        name for name in names if name in inspect.signature(inspect.unwrap(type(attention).forward)).parameters
    )
    former = {"cache": "past_key_values", "past_key_values": "past_key_value"}[current]
    for name in (current, former):
        rebound(attention, hidden, position_embeddings=angles, attention_mask=None, **{name: cache})
    assert len(seen) == 2 and torch.equal(*seen)


def test_what_stands_in_the_way(monkeypatch):
    model = tiny_model("llama")
    assert "float32" in obstacle(model, CPU)
    assert obstacle(model.bfloat16(), CPU) is None
    monkeypatch.setattr(fused_model, "why_torch", lambda device: "no kernels here")
    assert obstacle(model, CPU) == "no kernels here"
    with pytest.raises(ValueError, match="cannot be fused: no kernels here"):
        fuse(model)


def test_fusing_twice_and_unknown_kinds_are_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="GELU.*RMSNorm, SwiGLU, RoPE"):
        fuse(model, ("GELU",))
    fused = fuse(model)
    with pytest.raises(ValueError, match="fused already"):
        fuse(model)
    fused.remove()
    fuse(model).remove()


def test_only_kvfactorys_own_decoding_runs_fused(monkeypatch):
    """An attached model computes stock forwards outside `generate`, and is stock again after `detach`."""
    calls = []

    class Counted:
        def switch(self, active):
            calls.append(active)

        def remove(self):
            calls.append("removed")

    model = tiny_model("llama")
    monkeypatch.setattr("kvfactory.fused_model.obstacle", lambda *_: None)
    monkeypatch.setattr("kvfactory.fused_model.fuse", lambda model: Counted())
    attach(model, "snapkv", max_capacity_prompt=32)
    model(random_prompt(40, seed=1)[None])
    assert calls == []
    generate(model, random_prompt(40, seed=1), 3, eos_token_id=[])
    assert calls == [True, False]
    attachment = model.__dict__["_kvfactory_attachment"]
    with attachment.fused():
        generate(model, random_prompt(40, seed=1), 3, eos_token_id=[])
        assert calls[2:] == [True, True, True]  # still on: the outer one is not done
    assert calls[5:] == [False]
    del calls[2:]
    detach(model)
    assert calls == [True, False, "removed"]
    attach(model, "snapkv", max_capacity_prompt=32, fuse=False)
    generate(model, random_prompt(40, seed=1), 3, eos_token_id=[])
    assert len(calls) == 3
    detach(model)
