"""H2O's decode-time eviction against its authors' code: what is stored after every step, and every attention output.

A step attends to what is stored and to its own token, then evicts. Paper preset, one key-value head per query head.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfactory.backends import get_backend
from kvfactory.cache.store import DenseStore
from kvfactory.methods.base import LayerShape, PromptContext
from kvfactory.ops.select import gather_tokens
from kvfactory.plan import make_plan


def _cases(folder: Path):
    return json.loads((folder / "decode_h2o.json").read_text(encoding="utf-8"))


def _inputs(case):
    draw = np.random.default_rng(case["seed"])
    length = case["S"] + case["T"]
    q, k, v = (
        torch.tensor(draw.standard_normal((1, case[heads], length, case["D"])), dtype=torch.float32)
        for heads in ("H", "KV", "KV")
    )
    return q * 3, k, v


def test_both_cases_are_there(golden_dir):
    assert [case["key"] for case in _cases(golden_dir)] == ["d0", "d1"]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_step(golden_dir, number, backend):
    case = _cases(golden_dir)[number]
    arrays = np.load(golden_dir / "decode_h2o.npz")
    kept_sets, outputs = arrays[case["key"] + "_kept"], arrays[case["key"] + "_out"]
    H, S, T, D, budget = (case[name] for name in ("H", "S", "T", "D", "budget"))
    q, k, v = _inputs(case)
    plan = make_plan("h2o", max_capacity_prompt=budget, window_size=case["recent"], preset="paper")
    cluster = plan.build(LayerShape(0, 1, H, case["KV"], D))
    ctx = PromptContext(S, budget)
    kept = cluster.compress(q[:, :, :S], k[:, :, :S], v[:, :, :S], ctx)
    store = DenseStore(gather_tokens(k, kept), gather_tokens(v, kept), slack=T)
    store.add_columns(kept.columns, kept.history)

    def check(step):
        for head, want in zip(store.column("position")[0].tolist(), kept_sets[step], strict=True):
            assert sorted(head) == sorted(want[want >= 0].tolist()), step

    check(0)
    full = 0
    for step in range(T):
        now = slice(S + step, S + step + 1)
        store.append(k[:, :, now], v[:, :, now])
        out = store.attend(q[:, :, now], scale=D**-0.5, backend=get_backend(backend))
        # Sums of 65 products in another order; outputs have magnitude 1.
        np.testing.assert_allclose(out[0, 0].numpy(), outputs[step], rtol=0, atol=2e-6)
        cluster.evict(q[:, :, now], store, S + step, ctx)
        assert store.length <= budget
        full += store.length == budget
        check(step + 1)
    assert full >= T - max(0, budget - S)  # the figures did exercise eviction
