"""Every merge case of the original project's code: the same merged keys and values per stored head.

The figures list a head's rows in the order of its scores, which are not part of them, so that rows are matched by
content: every one of theirs has its own one of ours.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfactory import compress_prompt

READ = {"h2o": ("window_size",), "snapkv": ("window_size", "kernel_size", "pooling")}


def _load():
    folder = os.environ.get("KVFACTORY_GOLDEN")
    path = Path(folder or ".") / "prompt_selection.json"
    if not folder or not path.is_file():
        return []
    return [case for case in json.loads(path.read_text(encoding="utf-8")) if "merge" in case]


CASES = _load()


@pytest.fixture(scope="module")
def arrays(golden_dir):
    return np.load(golden_dir / "prompt_selection.npz")


def test_all_cases_run(golden_dir):
    assert Counter((case["method"], case["merge"]) for case in CASES) == {
        ("snapkv", "pivot"): 10,
        ("snapkv", "weighted"): 10,
        ("h2o", "pivot"): 10,
    }


@pytest.mark.parametrize("case", CASES, ids=[f"{c['key']}-{c['method']}-{c['merge']}" for c in CASES])
def test_merged_rows(case, arrays):
    draw = np.random.default_rng(case["seed"])
    H, KV, L, D = (case[name] for name in ("H", "KV", "L", "D"))
    q, k, v = (torch.tensor(draw.standard_normal((1, h, L, D)), dtype=torch.float32) for h in (H, KV, KV))
    kept = compress_prompt(
        case["method"],
        q,
        k,
        v,
        max_capacity_prompt=case["max_capacity_prompt"],
        kv_cache_granularity=case["granularity"],
        gqa_score_agg=case["agg"],
        merge=case["merge"],
        **{name: case[name] for name in READ[case["method"]]},
    )
    golden = [arrays[f"{case['key']}_{name}"][0] for name in "kv"]
    assert len(kept.keys[0]) == len(golden[0]) == (H if case["granularity"] == "query_head" else KV)
    for h, (keys, values) in enumerate(zip(*golden, strict=True)):
        # A key and its value are matched together, so that swapped values would show.
        ours = torch.cat([kept.keys[0][h], kept.values[0][h]], dim=1).numpy()
        theirs = np.concatenate([keys, values], axis=1)
        assert ours.shape == theirs.shape
        distance = np.abs(theirs[:, None] - ours[None]).max(axis=-1)
        match = distance.argmin(axis=1)
        assert len(set(match.tolist())) == len(match)
        # Up to a hundred float32 numbers of magnitude 1 averaged in another order.
        assert distance.min(axis=1).max() < 2e-6
