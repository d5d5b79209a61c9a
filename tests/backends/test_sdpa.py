"""Which shapes sdpa's kernels see: cuDNN plans each new one anew, so it is given few."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvfactory.backends import get_backend, sdpa
from kvfactory.cache.ragged import RaggedStore
from kvfactory.kernels.reference import segment_decode
from kvfactory.methods.base import RaggedKept

CUDNN = SDPBackend.CUDNN_ATTENTION.value
UNIT = sdpa.PLANNED_LENGTHS


def prompt(S, Hq=6, Hk=2, D=16, device="cpu", dtype=torch.float32):
    """q, k, v as models leave them: (B, S, H, D) in memory."""
    g = torch.Generator().manual_seed(S)
    return [torch.randn(2, S, h, D, generator=g).to(device, dtype).transpose(1, 2) for h in (Hq, Hk, Hk)]


@pytest.fixture
def seen(monkeypatch):
    """Lengths of queries and keys, and whether cuDNN was allowed, at every call of sdpa."""
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **options):
        calls.append((q.shape[2], k.shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("S", [2, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 77])
def test_cudnn_gets_prompts_of_few_lengths_and_gives_the_same_rows(S, seen, monkeypatch):
    q, k, v = prompt(S)
    want = sdpa.attend(q, k, v, scale=0.3, causal=True)
    monkeypatch.setattr(sdpa, "_chosen", lambda *_: CUDNN)
    got = sdpa.attend(q, k, v, scale=0.3, causal=True)
    assert [call[:2] for call in seen] == [(S, S), (-(-S // UNIT) * UNIT,) * 2]
    assert got.shape == want.shape == (2, S, 6, 16)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # float32 over at most 589 tokens, other blocks


@pytest.mark.parametrize("chosen", [None, SDPBackend.FLASH_ATTENTION.value, SDPBackend.MATH.value])
def test_other_kernels_get_the_prompt_as_it_is(chosen, seen, monkeypatch):
    monkeypatch.setattr(sdpa, "_chosen", lambda *_: chosen)
    sdpa.attend(*prompt(UNIT + 3), scale=0.3, causal=True)
    assert [call[:2] for call in seen] == [(UNIT + 3,) * 2]


def test_a_read_that_is_not_causal_is_never_padded(seen, monkeypatch):
    """Its mask is as wide as its keys, and without one every key counts."""
    monkeypatch.setattr(sdpa, "_chosen", lambda *_: CUDNN)
    q, k, v = prompt(19)
    want = get_backend("eager")(q, k, v, scale=0.3, causal=False)
    got = sdpa.attend(q, k, v, scale=0.3, causal=False)
    assert [call[:2] for call in seen] == [(19, 19)]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # float32 over 19 tokens


@pytest.mark.parametrize("allowed", [True, False])
def test_single_tokens_go_past_cudnn_and_its_switch_stays_as_it_was(allowed, seen, monkeypatch):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        q, k, v = prompt(19)
        sdpa.attend(q, k, v, scale=0.3, causal=True)
        sdpa.attend(q[:, :, -1:], k, v, scale=0.3, causal=False)
        with pytest.raises(RuntimeError):
            narrow = torch.ones(1, 1, 1, 7, dtype=torch.bool)
            sdpa.attend(q[:, :, -1:], k, v, scale=0.3, causal=False, mask=narrow)
        assert [call[2] for call in seen] == [allowed, False, False]
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_the_decode_kernel_reads_segments_where_it_runs_and_takes_them(monkeypatch):
    q = torch.zeros(3, 4, 16)
    assert sdpa.segments_for(q) is None
    monkeypatch.setattr(sdpa, "use_triton", lambda device: True)
    from kvfactory.kernels.decode_attention import decode_attention

    assert sdpa.segments_for(q) is decode_attention
    for refused in (torch.zeros(3, 17, 16), torch.zeros(3, 4, 257), q.double()):
        assert sdpa.segments_for(refused) is None


def test_a_ragged_store_reads_single_tokens_by_segments_and_masked_ones_by_buckets(monkeypatch):
    lengths = torch.tensor([[5, 40, 33]])
    k, v = (torch.randn(78, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    store = RaggedStore.build(k[None, None], v[None, None], RaggedKept(torch.arange(78), lengths.flatten()), slack=2)
    q = torch.randn(1, 6, 1, 16, generator=torch.Generator().manual_seed(3))
    by_bucket = store.attend(q, scale=0.3, backend=get_backend("sdpa"))
    calls = []

    def read(*args, scale):
        calls.append(args[0].shape)
        return segment_decode(*args, scale=scale)

    monkeypatch.setattr(sdpa, "segments_for", lambda q: read)
    by_segment = store.attend(q, scale=0.3, backend=get_backend("sdpa"))
    assert calls == [(3, 2, 16)]
    torch.testing.assert_close(by_segment, by_bucket, rtol=1e-5, atol=1e-5)  # float32 over 40 tokens
    visible = torch.ones(1, 6, 1, 40, dtype=torch.bool)
    store.attend(q, scale=0.3, backend=get_backend("sdpa"), visible=visible)
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", [77, 1000, 2049, 4003])
def test_padding_changes_no_bit_on_cudnn(S, D, seen):
    q, k, v = prompt(S, Hq=8, D=D, device="cuda", dtype=torch.bfloat16)
    if torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=0.1, enable_gqa=True) != CUDNN:
        pytest.skip("sdpa does not choose cuDNN on this device")
    plain = sdpa._attend(q, k, v, 0.1, True, None)
    assert torch.equal(sdpa.attend(q, k, v, scale=0.1, causal=True), plain)
    assert [call[0] for call in seen] == [S, -(-S // UNIT) * UNIT]
