"""Kernels of a model's small operations on odd shapes and inside models, interpreted or on a GPU: see `interpreter`."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, INTERPRETED, teach_bfloat16

from kvfactory.capability import FAMILIES
from kvfactory.fused_model import fuse
from kvfactory.kernels import dispatch, model_reference
from kvfactory.kernels.checks import compare
from kvfactory.kernels.model_ops import check, rms_norm, rotate_queries_and_keys, swiglu
from kvfactory.tiny_models import random_prompt, tiny_model

if INTERPRETED:
    teach_bfloat16()

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_right(got, plain, exact):
    assert got.shape == plain.shape and got.dtype == plain.dtype
    result = compare("", got, plain, exact)
    assert result.passed, result
    if got.dtype != torch.float32:
        # Equal rounding steps: only where float32 differs in its last bits may a half number fall to the other side.
        assert float((got != plain).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (16, 1, 96), (1, 7, 33), (2, 5, 6, 64), (3, 16384), (1, 1), (0, 64)])
def test_rms_norm_equals_the_definition(shape, dtype):
    """Rows of one and of several to a program, and of a size that is no power of two."""
    x, weight = 3 * draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    got = rms_norm(x, weight, 1e-2)
    if got.numel():
        exact = model_reference.rms_norm(x.double(), weight.double(), 1e-2)
        assert_right(got, model_reference.rms_norm(x, weight, 1e-2), exact)
    assert got.shape == x.shape and torch.equal(x, before)


def test_rms_norm_of_a_strided_view():
    x = draw(3, 7, 2, 40, dtype=torch.float32).transpose(1, 2)[..., :32]
    weight = draw(32, dtype=torch.float32)
    exact = model_reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert_right(rms_norm(x, weight, 1e-6), model_reference.rms_norm(x, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, chunked", [(1, "gate up"), (80, ""), (1024, "gate up"), (1500, "gate"), (1500, "up")])
@pytest.mark.parametrize("in_place", [True, False])
def test_swiglu_equals_the_definition(D, chunked, in_place, dtype):
    """Less and more than a program's channels; rows close together or, in a chunk, apart."""
    gate, up = (4 * draw(2, 3, 2 * D, dtype=dtype)).chunk(2, dim=-1)
    gate = gate if "gate" in chunked else gate.contiguous()
    up = up if "up" in chunked else up.contiguous()
    gate_before, up_before = gate.clone(), up.clone()
    got = swiglu(gate, up, out=gate if in_place else None)
    assert (got is gate) == in_place and torch.equal(up, up_before)
    assert in_place or torch.equal(gate, gate_before)
    plain = model_reference.swiglu(gate_before, up_before)
    assert_right(got, plain, model_reference.swiglu(gate_before.double(), up_before.double()))


def test_swiglu_of_large_gates_neither_overflows_nor_is_nan():
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4]], device=DEVICE)
    got = swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(got, model_reference.swiglu(gate, torch.ones_like(gate)), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cos_rows", [1, 2])
@pytest.mark.parametrize("Hq, Hk, t, D", [(9, 3, 5, 16), (32, 8, 1, 128), (17, 1, 2, 80), (5, 5, 3, 2)])
def test_rotation_equals_the_definition(Hq, Hk, t, D, cos_rows, dtype):
    """Heads as projections leave them; one or a row of angles per row of the batch; halves of cos that differ."""
    q, k = (draw(2, t, H, D, dtype=dtype, seed=H).transpose(1, 2) for H in (Hq, Hk))
    cos, sin = draw(2, cos_rows, t, D, dtype=dtype)
    before = q.clone()
    got = rotate_queries_and_keys(q, k, cos, sin)
    plain = model_reference.rotate_queries_and_keys(q, k, cos, sin)
    exact = model_reference.rotate_queries_and_keys(*(x.double() for x in (q, k, cos, sin)))
    for case in zip(got, plain, exact, strict=True):
        assert_right(*case)
        assert dtype == torch.float32 or torch.equal(case[0], case[1])  # no sum of float32: every bit
    assert torch.equal(q, before) and got[0].stride() == q.stride()


def test_rotation_of_slices_of_one_projection():
    """Phi-3's queries and keys lie side by side in the rows of one tensor, with values behind them."""
    q, k, _ = draw(2, 3, (4 + 2 + 2) * 16, dtype=torch.bfloat16).split([64, 32, 32], dim=-1)
    q, k = q.view(2, 3, 4, 16).transpose(1, 2), k.view(2, 3, 2, 16).transpose(1, 2)
    cos, sin = draw(2, 1, 3, 16, dtype=torch.bfloat16)
    got = rotate_queries_and_keys(q, k, cos, sin)
    for ours, plain in zip(got, model_reference.rotate_queries_and_keys(q, k, cos, sin), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies the buffers of 4 GiB")
def test_rows_beyond_two_to_the_31_elements():
    rows, D = 2**31 // 16384 + 3, 16384
    x = torch.ones(rows, D, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = draw(D, dtype=torch.bfloat16)
    last, ones = x[-1:].clone(), torch.ones(D, dtype=torch.bfloat16, device=DEVICE)
    want = model_reference.rms_norm(last, ones, 1e-6)
    torch.testing.assert_close(rms_norm(x, ones, 1e-6)[-1:], want, rtol=0.01, atol=0)
    want = model_reference.swiglu(last, last)
    torch.testing.assert_close(swiglu(x, x, out=x)[-1:], want, rtol=0.01, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family, dtype", [("llama", torch.float32), *((name, torch.bfloat16) for name in FAMILIES)])
def test_a_fused_model_computes_what_the_stock_model_does(family, dtype, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    model = tiny_model(family).to(DEVICE, dtype)
    prompt = random_prompt(5)[None].to(DEVICE)
    stock = model(prompt).logits
    exact = tiny_model(family).to(DEVICE, dtype).float()(prompt).logits
    fused = fuse(model)
    got = model(prompt).logits
    fused.remove()
    # Twice the stock model's own error in half precision; in float32, the reference itself, sums in another order.
    rounding = 32 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert float((got - exact).abs().max()) <= 2 * float((stock - exact).abs().max()) + rounding
    assert torch.equal(model(prompt).logits, stock)


def test_the_doctors_checks_pass():
    for result in check(DEVICE, torch.bfloat16):
        assert result.passed, result
