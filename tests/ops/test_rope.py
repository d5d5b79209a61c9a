"""Moving rotary keys against rotating them from scratch, one pair of channels at a time."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import shared_model

from kvfactory.ops.rope import rotate


def placed(k, position, inv_freq):
    """Keys (..., D) at `position`, in float64: channel i turns with channel i + r / 2."""
    out, half = k.double().clone(), len(inv_freq)
    for i, frequency in enumerate(inv_freq.double().tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        a, b = k[..., i].double(), k[..., i + half].double()
        out[..., i], out[..., i + half] = a * cos - b * sin, b * cos + a * sin
    return out


FREQUENCIES = 10000.0 ** (-torch.arange(6) / 6)
KEYS = torch.randn(1, 3, 5, 16, generator=torch.Generator().manual_seed(0))  # 12 channels turn, 4 stay


@pytest.mark.parametrize("delta", [0, 1, 37, -12, 1500])
def test_moving_equals_rotating_unrotated_keys(delta):
    start = placed(KEYS, 80, FREQUENCIES).float()
    moved = rotate(start, delta, FREQUENCIES)
    # An angle of 1500 radians in float32 is off by up to 6e-5.
    torch.testing.assert_close(moved.double(), placed(KEYS, 80 + delta, FREQUENCIES), rtol=0, atol=2e-4)
    assert torch.equal(moved[..., 12:], start[..., 12:])
    assert not delta or not torch.equal(moved, start)


def test_moves_add_up_and_undo():
    twice = rotate(rotate(KEYS, 20, FREQUENCIES), -7, FREQUENCIES)
    torch.testing.assert_close(twice, rotate(KEYS, 13, FREQUENCIES), rtol=0, atol=1e-5)
    assert torch.equal(rotate(KEYS, 0, FREQUENCIES), KEYS)


def test_only_distances_matter_for_logits():
    """A query and a key moved alike have the product they had."""
    q, k = KEYS[0, 0], KEYS[0, 1]
    product = q @ k.T
    moved = rotate(q, 311, FREQUENCIES) @ rotate(k, 311, FREQUENCIES).T
    torch.testing.assert_close(moved, product, rtol=0, atol=2e-4)
    assert not torch.allclose(q @ rotate(k, 311, FREQUENCIES).T, product, atol=1e-2)


def test_half_precision_is_rounded_once():
    half = KEYS.bfloat16()
    moved = rotate(half, 37, FREQUENCIES)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, rotate(half.float(), 37, FREQUENCIES).bfloat16())


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "qwen3"])
def test_as_the_models_rotate(name):
    """transformers' own embedding at two positions, a scaled one too: its length factor is in the keys already."""
    model = shared_model(name)
    rotary = model.model.rotary_emb
    modeling = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    k = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1))
    at = {}
    for position in (9, 52):
        cos, sin = rotary(k, torch.tensor([[position]]))
        at[position] = modeling.apply_rotary_pos_emb(k, k, cos, sin)[1]
    torch.testing.assert_close(rotate(at[9], 43, rotary.inv_freq), at[52], rtol=0, atol=2e-5)
