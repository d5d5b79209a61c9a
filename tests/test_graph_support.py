"""Why a step cannot be captured: one reason at a time, on models of which only that is wrong."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from kvfactory import attach
from kvfactory.graph_support import _of_method, graph_obstacle
from kvfactory.methods import METHODS
from kvfactory.plan import make_plan

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch):
    monkeypatch.setattr("kvfactory.graph_support.why_torch", lambda device: None)


def obstacle(model, method="snapkv", device=CUDA, dtype=torch.float32, **options):
    attachment = attach(model, method, max_capacity_prompt=32, **options)
    return graph_obstacle(attachment, attachment.plan, device, dtype)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_families_that_replay(family, dtype):
    assert obstacle(tiny_model(family), dtype=dtype) is None


@pytest.mark.parametrize("device", ["cpu", "mps", "meta"])
def test_only_cuda_has_graphs(device):
    assert obstacle(tiny_model("llama"), device=torch.device(device)) == "CUDA graphs need a CUDA device"


def test_without_kernels(monkeypatch):
    monkeypatch.setattr("kvfactory.graph_support.why_torch", lambda device: "triton is not installed")
    assert obstacle(tiny_model("llama")) == "triton is not installed"


def test_sliding_layers():
    sliding = dict(use_sliding_window=True, sliding_window=16, layer_types=["full_attention"] * 2)
    model = tiny_model(
        "qwen2", **sliding | {"layer_types": ["full_attention", "sliding_attention"]}, num_hidden_layers=2
    )
    assert "sliding-window layers" in obstacle(model)
    assert obstacle(tiny_model("qwen2", **sliding, num_hidden_layers=2)) is None


@pytest.mark.parametrize("kind, fixed", [("dynamic", False), ("linear", True)])
def test_frequencies_that_change_with_the_length(kind, fixed):
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    found = obstacle(tiny_model("llama", rope_scaling=scaling))
    assert found == (None if fixed else "the model's rotary frequencies change with the length")


def test_experts():
    assert "experts are chosen with the host's help" in obstacle(tiny_model("mixtral"))


@pytest.mark.parametrize(
    "group, dtype, word",
    [(16, torch.float32, None), (17, torch.float32, "16 query heads"), (2, torch.float64, "precision")],
)
def test_shapes_of_the_decode_kernel(group, dtype, word):
    found = obstacle(
        tiny_model("llama", hidden_size=8 * group, num_attention_heads=group, num_key_value_heads=1, head_dim=8),
        dtype=dtype,
    )
    assert found is None if word is None else word in found


@pytest.mark.parametrize("size, fits", [(256, True), (258, False)])
def test_head_dim_of_the_decode_kernel(size, fits):
    found = obstacle(tiny_model("llama", head_dim=size))
    assert found is None if fits else found == "the decode kernel takes a head_dim up to 256"


def test_methods_that_act_on_every_step():
    attachment = attach(tiny_model("llama"), "fullkv")
    for name in METHODS:
        if name == "HeadKV":  # needs a score file of the model
            continue
        reason = _of_method(attachment, make_plan(name, max_capacity_prompt=32))
        assert reason is None or name in reason
        assert (reason is None) == (name != "Oracle")
    evicting = make_plan("h2o", max_capacity_prompt=32, preset="paper")
    assert _of_method(attachment, evicting) == "H2O moves stored tokens at every step (--decode_evict on)"
    assert "Oracle chooses at every step what it reads" == _of_method(attachment, make_plan("oracle"))
    assert graph_obstacle(attachment, evicting, CUDA, torch.float32) == _of_method(attachment, evicting)


def test_the_models_reason_comes_first():
    model = tiny_model("llama")
    attachment = attach(model, "h2o", max_capacity_prompt=32, preset="paper")
    assert graph_obstacle(attachment, attachment.plan, torch.device("cpu"), torch.float32).startswith("CUDA graphs")
