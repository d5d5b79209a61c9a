"""Inputs and figures of the golden selection cases, for the tests of methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load_cases(folder: Path, name: str, method: str) -> tuple[list[dict[str, Any]], Any]:
    """The cases of `method` in <name>.json and the arrays of <name>.npz."""
    cases = [c for c in json.loads((folder / f"{name}.json").read_text()) if c["method"] == method]
    assert cases, f"no golden case of {method} in {name}.json"
    return cases, np.load(folder / f"{name}.npz")


def case_inputs(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (1, H, L, D), k and v (1, KV, L, D), float32."""
    rng = np.random.default_rng(case["seed"])
    shapes = [(1, case[heads], case["L"], case["D"]) for heads in ("H", "KV", "KV")]
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in shapes)
    return q, k, v


def random_qkv(
    B: int, Hq: int, Hk: int, S: int, D: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tie-free random q (B, Hq, S, D), k and v (B, Hk, S, D)."""
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, S, D, generator=g, dtype=torch.float64).to(dtype) for H in (Hq, Hk, Hk))
