"""The log-sum-exp of the prompt's attention: the proof of a kernel, and its way to the method that wants it."""

from __future__ import annotations

import functools
import re
import sys
import types
from dataclasses import replace

import pytest
import torch
from tiny import random_prompt, shared_model, step

from kvfactory import attach, detach
from kvfactory.backends import get_backend, sdpa
from kvfactory.backends.eager import attend
from kvfactory.backends.log_sum_exp import attend_proven, obstacle
from kvfactory.cache.batch import FanOutCache
from kvfactory.methods.base import KVCluster, LayerShape
from kvfactory.plan import make_plan

CPU = torch.device("cpu")


def dense_lse(q, k, scale):
    """(B, Hq, S) float64."""
    S = q.shape[2]
    logits = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3) * scale
    return logits.masked_fill(torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1), -torch.inf).logsumexp(-1)


def kernel(q, k, v, *, scale):
    return attend(q, k, v, scale=scale, causal=True), dense_lse(q, k, scale).float()


def raising(error):
    def kernel(*_, **__):
        raise error

    return kernel


def changed(change):
    return lambda *args, scale: change(*kernel(*args, scale=scale))


WRONG = {
    "an error": (raising(RuntimeError("head_dim is odd\nand more")), "^head_dim is odd$"),
    "base 2": (changed(lambda out, lse: (out, lse / 0.6931)), "log-sum-exp is off by"),
    "the default scale": (
        lambda q, k, v, scale: (kernel(q, k, v, scale=scale)[0], dense_lse(q, k, 0.2).float()),
        "off",
    ),
    "no mask": (
        lambda *args, scale: (attend(*args, scale=scale, causal=False), kernel(*args, scale=scale)[1]),
        "output",
    ),
    "a row of NaN": (
        changed(lambda out, lse: (out, lse.index_fill(2, torch.tensor([7]), torch.nan))),
        "log-sum-exp is",
    ),
    "rows before heads": (
        changed(lambda out, lse: (out, lse.transpose(1, 2).reshape(lse.shape))),
        "log-sum-exp is off",
    ),
    "four dimensions": (changed(lambda out, lse: (out, lse[..., None])), "it returns"),
    "half precision": (changed(lambda out, lse: (out, lse.half())), "it returns"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3])
def test_a_right_kernel_has_no_obstacle(dtype, group):
    assert obstacle(kernel, CPU, dtype, 24, group) is None


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_told_by_a_reason(fault):
    wrong, reason = WRONG[fault]
    found = obstacle(wrong, CPU, torch.bfloat16, 24, 3)
    assert found is not None and re.search(reason, found)


def test_a_full_device_is_no_verdict():
    with pytest.raises(torch.OutOfMemoryError):
        obstacle(raising(torch.OutOfMemoryError("full")), CPU, torch.float32, 8, 1)


def test_the_first_proven_kernel_attends_and_is_tried_once():
    calls = []

    def counted(q, k, v, *, scale):
        calls.append(q.shape[2])
        return kernel(q, k, v, scale=scale)

    q, k, v = (torch.randn(1, h, 19, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    wrong = WRONG["base 2"][0]
    for _ in range(2):
        out, lse = attend_proven((wrong, counted), q, k, v, scale=0.3)
    assert calls == [150, 19, 19]  # the trial's prompt is a model's only by accident
    want = kernel(q, k, v, scale=0.3)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    assert attend_proven((wrong,), q, k, v, scale=0.3) is None


def test_sdpa_gives_none_on_the_cpu():
    q = torch.randn(1, 2, 9, 8)
    assert get_backend("sdpa").attend_with_lse(q, q, q, scale=0.3) is None
    assert get_backend("eager").attend_with_lse is None


@pytest.mark.parametrize("reported", ["cudnn", "flash", "math"])
def test_sdpa_takes_the_kernel_that_it_would_choose(reported, monkeypatch):
    """Stand-ins for both operators, which exist on CUDA alone."""
    seen = []

    def operator(name, dims):
        def call(q, k, v, *_, is_causal, scale, **__):
            seen.append(name)
            assert is_causal
            out, lse = kernel(q, k, v, scale=scale)
            return out.transpose(1, 2), lse[(..., *[None] * dims)], None, None

        return call

    ops = types.SimpleNamespace(
        _scaled_dot_product_cudnn_attention=operator("cudnn", 1),
        _scaled_dot_product_flash_attention=operator("flash", 0),
    )
    monkeypatch.setattr(torch.ops, "aten", ops)
    monkeypatch.setattr(sdpa, "_chosen", lambda *_: {"math": 0, "flash": 1, "cudnn": 3}[reported])
    monkeypatch.setattr(sdpa, "attend_proven", functools.partial(first, seen))
    q, k, v = (torch.randn(1, h, 19, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    got = sdpa.attend_with_lse(q, k, v, scale=0.3)
    if reported == "math":
        assert got is None and not seen
        return
    assert seen == [["_cudnn", "_flash"] if reported == "cudnn" else ["_flash"], reported]
    want = kernel(q, k, v, scale=0.3)
    assert got[0].is_contiguous() and torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def first(seen, kernels, q, k, v, *, scale):
    kernels = list(kernels)
    seen.append([kernel.__name__ for kernel in kernels])
    return kernels[0](q, k, v, scale=scale)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_flash_asks_for_the_log_sum_exp(name, asked, monkeypatch):
    """Flash attention 2 returns a third value; early builds of 3 always return the log-sum-exp."""

    def rows_first(q, k, v, scale):
        out, lse = kernel(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale)
        return out, lse, None

    def with_parameter(q, k, v, softmax_scale, causal, return_attn_probs=False):
        assert causal
        result = rows_first(q, k, v, softmax_scale)
        return result if return_attn_probs else result[0]

    def without_parameter(q, k, v, softmax_scale, causal):
        return rows_first(q, k, v, softmax_scale)[:2]

    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "fa3_fwd_interface"}[name]
    function = with_parameter if asked else without_parameter
    fake = types.SimpleNamespace(flash_attn_func=function, flash_attn_varlen_func=lambda: None)
    monkeypatch.setitem(sys.modules, package, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    q, k, v = (torch.randn(1, h, 33, 16, generator=torch.Generator().manual_seed(h)).bfloat16() for h in (6, 2, 2))
    backend = get_backend(name)
    out, lse = backend.attend_with_lse(q, k, v, scale=0.3)
    assert torch.equal(out, backend(q, k, v, scale=0.3, causal=True))
    torch.testing.assert_close(lse.double(), dense_lse(q, k, 0.3), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="needs float16 or bfloat16"):
        backend.attend_with_lse(q.float(), k, v, scale=0.3)


@pytest.fixture
def attached_h2o(monkeypatch):
    """A model whose backend leaves the log-sum-exp, and a log of (method, wanted?, q, k, lse) of every compress."""
    compressed = []
    model = shared_model("llama")
    attachment = attach(model, "h2o", max_capacity_prompt=16)

    def watch(cls, wants):
        inner = cls.compress

        def compress(self, q, k, v, ctx):
            compressed.append((self.name, q.clone(), k.clone(), ctx.lse))
            return inner(self, q, k, v, ctx)

        monkeypatch.setattr(cls, "compress", compress)
        monkeypatch.setattr(cls, "wants_lse", lambda self, q, k: wants, raising=False)

    for slot in attachment.slots:
        slot.backend = replace(slot.backend, attend_with_lse=kernel)
    yield types.SimpleNamespace(model=model, attachment=attachment, watch=watch, compressed=compressed)
    detach(model)


def cluster_class(name):
    return type(make_plan(name, max_capacity_prompt=16).build(LayerShape(0, 3, 6, 2, 16)))


def test_every_layer_and_example_gets_its_own(attached_h2o):
    h = attached_h2o
    h.watch(cluster_class("h2o"), wants=True)
    seen = []
    for seed in (0, 1):
        cache = h.attachment.new_cache()
        step(h.model, random_prompt(40 + seed, seed=seed), cache)
        assert cache.context(None).lse is None
        step(h.model, random_prompt(1, seed=9), cache)  # decoding has none
        seen.append(len(h.compressed))
    layers = len(h.attachment.slots)
    assert seen == [layers, 2 * layers]
    for _, q, k, lse in h.compressed:
        torch.testing.assert_close(lse.double(), dense_lse(q, k, q.shape[-1] ** -0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wanting", [set(), {"snapkv"}, {"h2o", "snapkv"}])
def test_a_shared_prompt_asks_once_for_all(attached_h2o, wanting):
    h = attached_h2o
    for name in ("h2o", "snapkv"):
        h.watch(cluster_class(name), wants=name in wanting)
    plans = [make_plan(name, max_capacity_prompt=16) for name in ("h2o", "snapkv")]
    fan = FanOutCache(h.attachment, [h.attachment.new_cache(plan) for plan in plans])
    step(h.model, random_prompt(40), fan)
    assert {name for name, *_ in h.compressed} == {"H2O", "SnapKV"} and not fan.failures
    for _, q, k, lse in h.compressed:
        assert (lse is not None) == bool(wanting)
        if wanting:
            torch.testing.assert_close(lse.double(), dense_lse(q, k, q.shape[-1] ** -0.5), rtol=1e-6, atol=1e-6)


def test_no_log_sum_exp_under_a_mask_or_without_a_kernel(attached_h2o):
    h = attached_h2o
    h.watch(cluster_class("h2o"), wants=True)
    layer = h.attachment.new_cache().kv_layers[0]
    q, k, v = (torch.randn(1, heads, 20, 16) for heads in (6, 2, 2))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    masked, left = layer.attend_prompt(q, k, v, mask, 0.25, [layer.cluster])
    plain, found = layer.attend_prompt(q, k, v, None, 0.25, [layer.cluster])
    assert left == {} and found.keys() == {"lse"}
    torch.testing.assert_close(masked, plain, rtol=1e-5, atol=1e-5)
    for none in (None, lambda *_, **__: None):
        layer.slot.backend = replace(layer.slot.backend, attend_with_lse=none)
        out, left = layer.attend_prompt(q, k, v, None, 0.25, [layer.cluster])
        assert left == {}
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)


def test_nobody_wants_it_by_default():
    assert not KVCluster.wants_lse(None, None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("S", [333, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_on_a_gpu(S, dtype):
    """The output is FullKV's up to the rounding of its dtype, and the log-sum-exp that of the logits."""
    g = torch.Generator(device="cuda").manual_seed(S)
    q, k, v = (torch.randn(1, S, h, 128, generator=g, device="cuda").to(dtype).transpose(1, 2) for h in (8, 2, 2))
    backend = get_backend("sdpa")
    assert None in sdpa.lse_obstacles(q.device, dtype, 128, 4).values()
    out, lse = backend.attend_with_lse(q, k, v, scale=0.1)
    torch.testing.assert_close(out, backend(q, k, v, scale=0.1, causal=True), rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), dense_lse(q, k, 0.1), rtol=1e-5, atol=1e-5)
