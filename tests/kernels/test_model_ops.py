"""Kernels of a model's small operations: what is refused, the definitions by hand, and the kernels against them."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_cuda, run_cases

from kvfactory.kernels import model_reference


def test_definitions_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    normed = model_reference.rms_norm(x, torch.tensor([1.0, 2.0]), 12.5)
    assert normed.tolist() == [[pytest.approx(3 / 5), pytest.approx(2 * 4 / 5)]]  # the mean of squares is 12.5
    gate, up = torch.tensor([0.0, 1.0]), torch.tensor([5.0, 2.0])
    assert model_reference.swiglu(gate, up).tolist() == [0.0, pytest.approx(2 / (1 + 2.718281828**-1))]
    q, k = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 4.0]]]])
    cos, sin = torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[10.0, 100.0]]])
    rotated = model_reference.rotate_queries_and_keys(q, k, cos, sin)
    assert [x.flatten().tolist() for x in rotated] == [[0.5 - 20, 0.5 + 100], [1.5 - 40, 1 + 300]]


def zeros(*shape, **kwargs):
    return torch.zeros(shape, **kwargs)


@pytest.mark.parametrize(
    "x, weight, said",
    [
        (zeros(2, 4, dtype=torch.float64), zeros(4, dtype=torch.float64), "x is torch.float64"),
        (zeros(2, 4), zeros(4).half(), "float32"),
        (zeros(2, 4), zeros(5), r"contiguous \(4,\)"),
        (zeros(2, 4), zeros(8)[::2], r"contiguous \(4,\)"),
        (zeros(1, 16385), zeros(16385), "16385"),
    ],
)
def test_norms_that_do_not_fit_are_refused(x, weight, said):
    pytest.importorskip("triton")
    from kvfactory.kernels.model_ops import rms_norm

    with pytest.raises(ValueError, match=said):
        rms_norm(x, weight, 1e-6)


@pytest.mark.parametrize(
    "gate, up, out, said",
    [
        (zeros(2, 4), zeros(2, 4).half(), None, "up must be"),
        (zeros(2, 4), zeros(2, 5), None, "differ in shape"),
        (zeros(2, 4), zeros(2, 4), zeros(1, 2, 4), "differ in shape"),
        (zeros(2, 8)[:, ::2], zeros(2, 4), None, "the stride 2"),
        (zeros(3, 2, 4).transpose(0, 1), zeros(2, 3, 4), None, "not a matrix of rows"),
    ],
)
def test_gates_that_do_not_fit_are_refused(gate, up, out, said):
    pytest.importorskip("triton")
    from kvfactory.kernels.model_ops import swiglu

    with pytest.raises(ValueError, match=said):
        swiglu(gate, up, out=out)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"k": zeros(1, 1, 4, 8)}, "q and k must be"),
        ({x: zeros(1, 1, 3, 7) for x in "qk"} | {x: zeros(1, 3, 7) for x in ("cos", "sin")}, "an even D"),
        ({"cos": zeros(1, 3, 4)}, "cos and sin must be"),
        ({"cos": zeros(2, 3, 8), "sin": zeros(2, 3, 8)}, "cos and sin must be"),
        ({"sin": zeros(1, 8, 3).transpose(1, 2)}, "contiguous"),
        ({"q": zeros(1, 2, 8, 3).transpose(2, 3)}, "along D"),
        ({"cos": zeros(1, 3, 8).half()}, "cos must be"),
    ],
)
def test_heads_and_angles_that_do_not_fit_are_refused(changes, said):
    pytest.importorskip("triton")
    from kvfactory.kernels.model_ops import rotate_queries_and_keys

    fitting = {"q": zeros(1, 2, 3, 8), "k": zeros(1, 1, 3, 8), "cos": zeros(1, 3, 8), "sin": zeros(1, 3, 8)}
    with pytest.raises(ValueError, match=said):
        rotate_queries_and_keys(**{**fitting, **changes})


def test_kernels_interpreted():
    run_cases("model_ops_cases.py", interpreted=True)


@pytest.mark.gpu
@needs_cuda
def test_kernels_on_the_gpu():
    run_cases("model_ops_cases.py", interpreted=False)


@pytest.mark.gpu
@needs_cuda
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_replayed_graph_follows_its_inputs(dtype):
    """A decode step of 16 rows at the shapes of an 8B model."""
    from kvfactory.kernels.model_ops import rms_norm, rotate_queries_and_keys, swiglu

    def fresh(seed):
        random = torch.Generator().manual_seed(seed)
        shapes = {"x": (16, 1, 4096), "weight": (4096,), "gate": (16, 1, 14336), "up": (16, 1, 14336)}
        shapes |= {"q": (16, 32, 1, 128), "k": (16, 8, 1, 128), "cos": (16, 1, 128), "sin": (16, 1, 128)}
        return {name: torch.randn(shape, generator=random).to("cuda", dtype) for name, shape in shapes.items()}

    held = fresh(0)

    def step(x, weight, gate, up, q, k, cos, sin):
        return rms_norm(x, weight, 1e-5), swiglu(gate, up, out=gate), *rotate_queries_and_keys(q, k, cos, sin)

    step(**held)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(**held)
    for seed in range(1, 4):
        new = fresh(seed)
        for name, x in new.items():
            held[name].copy_(x)
        graph.replay()
        for got, want in zip(outputs, step(**new), strict=True):
            assert torch.equal(got, want)
