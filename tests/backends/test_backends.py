"""Backends against float64 loops, and eager bit for bit against transformers."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from oracles import dense_attention

from kvfactory.backends import get_backend, sdpa
from kvfactory.kernels.reference import segment_decode


def qkv(t=19, n=19, Hq=6, Hs=2, D=12):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(2, h, s, D, generator=g) for h, s in ((Hq, t), (Hs, n), (Hs, n)))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (6, 6), (5, 1)])
def test_causal(name, heads):
    q, k, v = qkv(Hq=heads[0], Hs=heads[1])
    got = get_backend(name)(q, k, v, scale=0.3, causal=True)
    values = v.double().repeat_interleave(heads[0] // heads[1], dim=1)
    want = (dense_attention(q, k, 0.3) @ values).transpose(1, 2)
    assert got.shape == (2, 19, heads[0], 12)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)  # float32 over 19 tokens


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", [(2, 6, 3, 19), (1, 1, 3, 19), (2, 1, 1, 19)])
def test_masks_and_none(name, shape):
    q, k, v = qkv(t=3)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    values, keys = (x.double().repeat_interleave(3, dim=1) for x in (v, k))
    for used in (mask, None):
        got = get_backend(name)(q, k, v, scale=0.3, causal=False, mask=used)
        logits = q.double() @ keys.transpose(2, 3) * 0.3
        logits = logits if used is None else logits.masked_fill(~used, -torch.inf)
        want = (torch.softmax(logits, -1) @ values).transpose(1, 2)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="--attn_implementation 'flash' is not one of eager, sdpa"):
        get_backend("flash")


@pytest.mark.parametrize(
    "name, package", [("flash_attention_2", "flash_attn"), ("flash_attention_3", "fa3_fwd_interface")]
)
def test_flash_without_package_or_device(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"--attn_implementation {name} needs the package"):
        get_backend(name)
    monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"--attn_implementation {name} needs a CUDA device"):
        get_backend(name)


def _varlen(q, k, v, starts_q, starts_k, used, scale):
    """What both packages' varlen calls compute, sequence by sequence, in float32."""
    out = torch.empty_like(q)
    for s in range(len(starts_q) - 1):
        rows, n = slice(starts_q[s], starts_q[s + 1]), used[s]
        keys, values = (x[starts_k[s] : starts_k[s] + n, 0].float() for x in (k, v))
        out[rows, 0] = (torch.softmax(q[rows, 0].float() @ keys.T * scale, -1) @ values).to(q.dtype)
    return out


def _flash_2(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    used = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
    assert max(used) == max_seqlen_k and cu_seqlens_k[-1] == len(k) and not causal
    return _varlen(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), used, softmax_scale)


def _flash_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, seqused_k=None):
    assert seqused_k.max() == max_seqlen_k and seqused_k.dtype == cu_seqlens_k.dtype == torch.int32 and not causal
    return _varlen(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), seqused_k.tolist(), softmax_scale), None


@pytest.mark.parametrize(
    "name, package, varlen",
    [("flash_attention_2", "flash_attn", _flash_2), ("flash_attention_3", "fa3_fwd_interface", _flash_3)],
)
def test_flash_reads_segments_through_the_varlen_call(name, package, varlen, monkeypatch):
    monkeypatch.setitem(
        sys.modules, package, types.SimpleNamespace(flash_attn_func=lambda: None, flash_attn_varlen_func=varlen)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    g = torch.Generator().manual_seed(3)
    length = torch.tensor([1, 33, 7, 33, 20])
    start = torch.tensor([0, 5, 60, 5, 90])  # the second and the fourth segment share their slots
    q, k, v = (torch.randn(*shape, generator=g).bfloat16() for shape in ((5, 3, 24), (130, 24), (130, 24)))
    read = get_backend(name).segments_for(q)
    want = segment_decode(q, k, v, start, length, scale=0.2)
    torch.testing.assert_close(read(q, k, v, start, length, scale=0.2), want, rtol=0, atol=2e-2)  # one bf16 rounding
    with pytest.raises(ValueError, match="needs float16 or bfloat16"):
        read(q.float(), k, v, start, length, scale=0.2)
    monkeypatch.setattr(sdpa, "use_triton", lambda device: True)
    assert get_backend(name).segments_for(q) is get_backend("sdpa").segments_for(q)
