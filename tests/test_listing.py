"""The capability table, and that --verify finds what is wrong."""

from __future__ import annotations

import pytest
import torch

from kvfactory import list_methods
from kvfactory.listing import capability_table, verify
from kvfactory.methods import METHODS
from kvfactory.methods.base import Kept
from kvfactory.methods.snapkv import SnapKV


def run(methods, families=("llama",)):
    lines: list[str] = []
    return verify(lines.append, methods=methods, families=families), lines


def test_one_row_per_method_sorted():
    rows = list_methods()
    assert [row["method"] for row in rows] == sorted(METHODS, key=str.lower)
    assert all(row["reference"] and row["granularities"] and row["backends"] for row in rows)


def test_columns_of_the_table_are_aligned():
    lines = capability_table().splitlines()
    assert len(lines) == len(METHODS) + 2
    starts = [i for i, c in enumerate(lines[1]) if c == "-" and (i == 0 or lines[1][i - 1] == " ")]
    assert len(starts) == len(list_methods()[0])
    for line in lines:
        assert all(line[i] != " " and (i == 0 or line[i - 1] == " ") for i in starts)
    assert "slots per head" in capability_table() and "mean over layers" in capability_table()


@pytest.mark.parametrize("methods", [["FullKV", "SnapKV"], ["PyramidKV", "Random"]])
def test_claims_that_hold(methods):
    code, lines = run(methods, families=("llama", "qwen3"))
    assert code == 0
    assert sum("right on llama, qwen3" in line for line in lines) == 8
    assert lines[-1] == "16 cells right, 0 cells wrong, 16 cells not run" or torch.cuda.is_available()
    absent = [line for line in lines if line.startswith("not run: flash_attention_2")]
    assert len(absent) == 1 or torch.cuda.is_available()
    assert all("needs" in line and methods[0] in line for line in absent)


def _one_slot_short(self, q, k, v, ctx):
    kept = Kept(self.positions(q, k, v, ctx))
    return Kept(kept.indices[..., 1:])


def _not_finite(self, q, k, v, ctx):
    kept = Kept(self.positions(q, k, v, ctx))
    shape = (*kept.indices.shape, k.shape[-1])
    return Kept(kept.indices, values=torch.full(shape, float("nan")))


def _everything(self, q, k, v, ctx):
    return None


def _crash(self, q, k, v, ctx):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    "broken, told",
    [
        (_one_slot_short, "declared"),
        (_not_finite, "not finite"),
        (_everything, "declared"),
        (_crash, "RuntimeError: no such kernel"),
    ],
)
def test_claims_that_do_not_hold(monkeypatch, broken, told):
    monkeypatch.setattr(SnapKV, "compress", broken)
    code, lines = run(["SnapKV"])
    assert code == 1 and any("WRONG on llama" in line and told in line for line in lines)


def test_a_backend_that_disagrees_is_found(monkeypatch):
    from kvfactory.backends import eager

    honest = eager.attend

    def scaled(q, k, v, *, scale, causal, mask=None):
        return honest(q, k, v, scale=scale * 1.01, causal=causal, mask=mask)

    monkeypatch.setattr(eager, "attend", scaled)
    code, lines = run(["FullKV"])
    assert code == 1 and any("differ from sdpa's" in line for line in lines)
