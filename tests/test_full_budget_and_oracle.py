"""The bundled model: at full budget FullKV bit for bit; at 128 the stock model whose 4-D mask hides dropped tokens.

1,000 tokens run always, 7,500 under `slow`.
"""

from __future__ import annotations

import json

import pytest
import torch
from oracles import masked_logits, record_kept
from tiny import step

from kvfactory import attach, detach
from kvfactory.listing import REQUIRED_SETTINGS
from kvfactory.methods import METHODS

CLOSE = dict(rtol=0, atol=2e-3)
"""Logits of magnitude 20 after 30 float32 layers, summed in another order; dropped tokens move them by 0.1 to 10."""
QUICK = ("PyramidKV", "SnapKV")


def _masked() -> list[str]:
    """Evicting methods whose prompt-time selection a mask describes."""
    names = []
    for name in METHODS:
        cluster = METHODS.get(name)
        if cluster.capability.stage == "prompt-evict" and name != "CAM":
            names.append(name)
    return names


def _cases():
    cases = []
    for method in _masked():
        for granularity in ("kv_head", "query_head"):
            for length in (1000, 7500):
                quick = length == 1000 and method in QUICK and granularity == "kv_head"
                marks = () if quick else pytest.mark.slow
                cases.append(
                    pytest.param(method, granularity, length, marks=marks, id=f"{method}-{granularity}-{length}")
                )
    return cases


@pytest.fixture(scope="module")
def prompts(golden_dir):
    """Prompts of real text: one of 1,000 tokens, and all golden prompts twice, cut to 7,500."""
    golden = json.loads((golden_dir / "e2e_smollm2.json").read_text(encoding="utf-8"))["prompts"]
    texts = {p["dataset"]: p["ids"] for p in golden}
    everything = [i for _ in range(2) for p in golden for i in p["ids"]]
    return {1000: torch.tensor(texts["multi_news"]), 7500: torch.tensor(everything[:7500])}


_full: dict[int, list[torch.Tensor]] = {}
LATER = [torch.tensor([t]) for t in (28, 1234, 260)] + [torch.tensor([198, 17872, 42])]


def _full_logits(model, prompts, length):
    """FullKV's logits of the later tokens, computed once per prompt."""
    if length not in _full:
        attachment = attach(model, "fullkv")
        cache = attachment.new_cache(max_new_tokens=8)
        step_prompt(model, prompts[length], cache)
        _full[length] = [step(model, chunk, cache) for chunk in LATER]
        detach(model)
    return _full[length]


@torch.no_grad()
def step_prompt(model, ids, cache):
    from kvfactory.monkeypatch import cache_keyword

    model(ids[None], use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})


@pytest.mark.parametrize("method, granularity, length", _cases())
def test_full_budget_and_masked_oracle(smollm2, prompts, method, granularity, length):
    assert len(prompts[length]) == length
    full, settings = _full_logits(smollm2, prompts, length), REQUIRED_SETTINGS.get(method, {})
    for budget in (length, 128):
        attachment = attach(smollm2, method, max_capacity_prompt=budget, kv_cache_granularity=granularity, **settings)
        try:
            cache = attachment.new_cache(max_new_tokens=8)
            with record_kept(cache) as masks:
                step_prompt(smollm2, prompts[length], cache)
            ours = [step(smollm2, chunk, cache) for chunk in LATER]
            layers = [slot.model_layer for slot in attachment.slots]
        finally:
            detach(smollm2)
        if budget == length:
            assert all(torch.equal(a, b) for a, b in zip(ours, full, strict=True))
            continue
        assert all(float((a - b).abs().max()) > 50 * CLOSE["atol"] for a, b in zip(ours, full, strict=True))
        oracle = masked_logits(smollm2, prompts[length], LATER, dict(zip(layers, masks, strict=True)))
        for a, b in zip(ours, oracle, strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
