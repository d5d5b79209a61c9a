"""L2Norm: smallest key norms, whole layers, the options around them."""

from __future__ import annotations

import pytest
import torch
from oracles import best

from kvfactory import attach, compress_prompt
from kvfactory.methods.base import LayerShape
from kvfactory.methods.l2norm import L2Norm
from kvfactory.tiny_models import tiny_model


def qk(S=50):
    g = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, S, 9, generator=g), torch.randn(1, 2, S, 9, generator=g)


def kept(S=50, layer=2, layers=6, **options):
    q, k = qk(S)
    out = compress_prompt("l2norm", q, k, k, layer_idx=layer, num_layers=layers, **options)
    return [row.tolist() for row in out.indices[0]]


@pytest.mark.parametrize("granularity", ["query_head", "kv_head"])
@pytest.mark.parametrize("recent", [0, 5])
def test_positions(granularity, recent):
    got = kept(max_capacity_prompt=20, kv_cache_granularity=granularity, l2_recent=recent)
    norms = qk()[1][0].double().norm(dim=-1)[:, : 50 - recent]
    want = [best((-row).tolist(), 20 - recent) + list(range(50 - recent, 50)) for row in norms]
    assert got == (want if granularity == "kv_head" else [want[0], want[0], want[1], want[1]])


def test_ties_go_to_the_lower_position():
    q, k = torch.ones(1, 2, 30, 4), torch.ones(1, 1, 30, 4)
    out = compress_prompt("l2norm", q, k, k, max_capacity_prompt=11, skip_layers=())
    assert out.indices[0][0].tolist() == list(range(11))


@pytest.mark.parametrize(
    "layer, skip, count", [(0, (0, 1), 50), (1, (0, 1), 50), (2, (0, 1), 20), (0, (), 20), (5, (5,), 50)]
)
def test_skipped_layers_stay_whole(layer, skip, count):
    assert [len(row) for row in kept(layer=layer, skip_layers=skip, max_capacity_prompt=20)] == [count] * 4


def test_equalised_budgets_have_the_nominal_mean():
    """Six layers, two whole ones of 50: the other four share 6 * 30 - 100 = 80."""
    assert len(kept(max_capacity_prompt=30, l2_equalize=True)[0]) == 20
    with pytest.raises(ValueError, match="l2_equalize leaves"):
        kept(max_capacity_prompt=10, l2_equalize=True)


@pytest.mark.parametrize(
    "options, word",
    [
        (dict(skip_layers=(-1,)), "skip_layers -1"),
        (dict(skip_layers=(0.5,)), "skip_layers"),
        (dict(skip_layers="a,b"), "skip_layers 'a,b'"),
        (dict(l2_recent=-2), "l2_recent -2"),
        (dict(l2_recent=20), "max_capacity_prompts 20"),
    ],
)
def test_bad_settings(options, word):
    with pytest.raises(ValueError, match=word):
        kept(max_capacity_prompt=20, **options)


@pytest.mark.parametrize(
    "skipped, told",
    [
        ((0, 6), "--skip_layers 0,6 holds layer 6, the model has 6 full-attention layers, from 0 to 5"),
        ((5, 4, 3, 2, 1, 0), "--skip_layers 5,4,3,2,1,0 skips all 6 full-attention layers"),
    ],
)
def test_skipped_layers_that_do_not_fit_the_model(skipped, told):
    settings = L2Norm.Settings(skip_layers=skipped)
    with pytest.raises(ValueError, match=f"^{told}"):
        L2Norm.check_model(settings, LayerShape(0, 6, 4, 2, 9))
    L2Norm.check_model(settings, LayerShape(0, 7, 4, 2, 9))
    L2Norm.check_model(L2Norm.Settings(), LayerShape(0, 2, 4, 2, 9))  # the default fits models of any depth


def test_a_layer_named_twice_is_skipped_once():
    L2Norm.check_model(L2Norm.Settings(skip_layers=(1, 1)), LayerShape(0, 2, 4, 2, 9))
    options = dict(max_capacity_prompt=20, l2_equalize=True)
    assert kept(skip_layers=(1, 1), **options) == kept(skip_layers=(1,), **options)
    assert len(kept(skip_layers=(1, 1), **options)[0]) == (6 * 20 - 50) // 5


def test_an_attached_model_is_checked():
    with pytest.raises(ValueError, match="^--skip_layers 0,9 holds layer 9"):
        attach(tiny_model("llama"), "l2norm", skip_layers=(0, 9))
