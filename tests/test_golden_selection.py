"""Every prompt selection of the original project's code: the same kept set per stored head, sums of kept values.

A case whose method or merge is not registered yet is left out by what the registry holds, so that the list shrinks by
itself; the number of cases that run is asserted, so that it cannot shrink the other way.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvfactory import compress_prompt
from kvfactory.methods import METHODS
from kvfactory.plan import make_plan

FLOORS = {"pyramidkv": 60, "snapkv": 36, "l2norm": 28, "h2o": 14, "streamingllm": 14}
"""Cases without merge of the methods that exist from the start: 152 together."""
SHARED = {"max_capacity_prompt": "max_capacity_prompt", "granularity": "kv_cache_granularity", "agg": "gqa_score_agg"}
READ = {
    "streamingllm": {"window_size": "window_size"},
    "h2o": {"window_size": "window_size"},
    "l2norm": {"skip_layers": "skip_layers"},
    "snapkv": {s: s for s in ("window_size", "kernel_size", "pooling")},
    "pyramidkv": {s: s for s in ("window_size", "kernel_size", "pooling")},
    "adakv": {s: s for s in ("window_size", "kernel_size", "pooling", "floor", "normalize")},
    "headkv": {s: s for s in ("window_size", "kernel_size", "pooling", "head_capacity")},
}
"""What each method reads of a case; methods with outputs of their own (think) are tested beside the method."""


def _load() -> list[dict[str, Any]]:
    folder = os.environ.get("KVFACTORY_GOLDEN")
    path = Path(folder or ".") / "prompt_selection.json"
    return json.loads(path.read_text(encoding="utf-8")) if folder and path.is_file() else []


def _implemented(case: dict[str, Any]) -> bool:
    if case["method"] not in METHODS or case["method"] not in READ:
        return False
    if "merge" not in case:
        return True
    try:
        make_plan(case["method"], merge=case["merge"], max_capacity_prompt=64)
    except (ValueError, TypeError):
        return False
    return True


CASES = [case for case in _load() if _implemented(case)]


@pytest.fixture(scope="module")
def arrays(golden_dir):
    return np.load(golden_dir / "prompt_selection.npz")


def test_enough_cases_run(golden_dir):
    counted = Counter(case["method"] for case in CASES if "merge" not in case)
    assert {method: counted[method] for method in FLOORS} == FLOORS
    assert len(CASES) >= 152
    # A registered method whose cases are all left out would go unnoticed.
    everything = json.loads((golden_dir / "prompt_selection.json").read_text(encoding="utf-8"))
    plain = Counter(c["method"] for c in everything if "merge" not in c and c["method"] in READ)
    assert all(counted[m] == n for m, n in plain.items() if m in METHODS)


@pytest.mark.parametrize("case", CASES, ids=[f"{c['key']}-{c['method']}-{c.get('merge', 'plain')}" for c in CASES])
def test_kept_sets(case, arrays):
    draw = np.random.default_rng(case["seed"])
    H, KV, L, D = case["H"], case["KV"], case["L"], case["D"]
    q, k, v = (torch.tensor(draw.standard_normal((1, h, L, D)), dtype=torch.float32) for h in (H, KV, KV))
    names = SHARED | READ[case["method"]] | ({"merge": "merge"} if "merge" in case else {})
    options = {ours: case[theirs] for theirs, ours in names.items() if theirs in case}
    kept = compress_prompt(
        case["method"],
        q,
        k,
        v,
        layer_idx=case.get("layer_idx", 0),
        num_layers=case.get("num_hidden_layers", 32),
        **options,
    )
    heads = H if case["granularity"] == "query_head" else KV
    if "merge" in case:
        check_merged(kept, [arrays[case["key"] + part].reshape(heads, -1, D) for part in ("_k", "_v")])
        return
    golden = arrays[case["key"] + "_idx"]
    if "head_lens" in case:
        want = np.split(golden.reshape(-1), np.cumsum(case["head_lens"])[:-1])
    else:
        want = list(golden.reshape(heads, -1))
    assert len(kept.indices[0]) == len(want) == heads
    for got, expected in zip(kept.indices[0], want, strict=True):
        assert got.tolist() == sorted(expected.tolist())
    if case["key"] + "_vsum" in arrays:
        sums = np.split(arrays[case["key"] + "_vsum"].reshape(-1), np.cumsum([len(row) for row in want])[:-1])
        for rows, expected, positions in zip(kept.values[0], sums, want, strict=True):
            # Sums of up to 128 float32 numbers of magnitude 1, in another order.
            np.testing.assert_allclose(rows.sum(-1).numpy(), expected[np.argsort(positions)], rtol=0, atol=1e-4)


def check_merged(kept, golden):
    """Merged keys and values, which the golden file holds in score order: both sides are put in order of a column."""
    for ours, theirs in zip((kept.keys[0], kept.values[0]), golden, strict=True):
        assert len(ours) == len(theirs)
        for rows, expected in zip(ours, theirs, strict=True):
            rows = rows.numpy()
            assert rows.shape == expected.shape
            # Means of up to a few hundred float32 rows of magnitude 1, added in another order.
            np.testing.assert_allclose(
                rows[np.argsort(rows[:, 0])], expected[np.argsort(expected[:, 0])], rtol=0, atol=1e-4
            )
