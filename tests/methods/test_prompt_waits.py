"""How often the host waits for the device while a prompt is compressed and stored: a stall there idles the GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvfactory.cache.ragged import RaggedStore
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import LayerShape, PromptContext, RaggedKept
from kvfactory.plan import make_plan

METHODS = ("adakv", "h2o", "headkv", "l2norm", "pyramidkv", "snapkv", "streamingllm")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("granularity", ["kv_head", "query_head"])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_never_waits(method, granularity, kernels, monkeypatch):
    """The second pass is counted: compilation and first allocations may wait."""
    monkeypatch.setenv("KVFACTORY_KERNELS", kernels)
    options = {"head_path": "uniform"} if method == "headkv" else {}
    plan = make_plan(method, max_capacity_prompt=200, kv_cache_granularity=granularity, **options)
    cluster = plan.build(LayerShape(2, 4, 8, 2, 64))
    q, k, v = (torch.randn(1, h, 900, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    ctx = PromptContext(900, 200)

    def one_pass():
        kept = cluster.compress(q, k, v, ctx)
        if isinstance(kept, RaggedKept):
            return RaggedStore.build(k, v, kept, slack=8)
        return DenseStore(k, v, slack=8, kept=kept)

    one_pass()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            one_pass()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Not the notice, once per process, that this mode is a prototype.
    assert [str(w.message) for w in caught if "called a synchronizing" in str(w.message)] == []
