"""Decode attention kernels: how work is split, what is refused, and the kernels against their definition."""

from __future__ import annotations

import pytest
import torch
from interpreter import needs_cuda, run_cases

from kvfactory.kernels import reference
from kvfactory.kernels.checks import compare
from kvfactory.kernels.segments import check_new_tokens, check_segments, choose_splits


@pytest.mark.parametrize(
    "segments, capacity, splits",
    [
        (8, 64, 1),  # less than one program's share
        (8, 2176, 9),  # as many shares as there are tokens for
        (8, 131072, 33),  # two programs per multiprocessor
        (128, 2176, 8),  # the device is full, but segments may be uneven
        (2000, 300, 2),
        (1, 10**6, 128),
    ],
)
def test_splits_on_a_device_of_132_multiprocessors(segments, capacity, splits):
    assert choose_splits(segments, capacity, 132) == splits


def held(**changes):
    k = torch.zeros(10, 16)
    return {"k": k, "v": k.clone(), "starts": torch.tensor([0, 5]), "lengths": torch.tensor([4, 4]), **changes}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"v": torch.zeros(10, 8)}, "contiguous"),
        ({"k": torch.zeros(10, 32)[:, :16]}, "contiguous"),
        ({x: torch.zeros(10, 16, dtype=torch.float64) for x in "kv"}, "float64"),
        ({"v": torch.zeros(10, 16, dtype=torch.float16)}, "float16"),
        ({"k": torch.zeros(4, 272), "v": torch.zeros(4, 272)}, "272"),
        ({"lengths": torch.tensor([4])}, "lengths"),
        ({"starts": torch.tensor([0.0, 5.0])}, "starts"),
    ],
)
def test_segments_the_kernels_cannot_address_are_refused(changes, said):
    check_segments(**held())
    with pytest.raises(ValueError, match=said):
        check_segments(**held(**changes))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"v_new": torch.zeros(1, 2, 1, 8)}, "v_new"),
        ({"k_new": torch.zeros(1, 2, 2, 16)}, "k_new"),
        ({"copies": 2}, "2 copies"),
        ({"k_new": torch.zeros(1, 2, 1, 16).half()}, "float32"),
        ({"k_new": torch.zeros(1, 2, 1, 32)[..., ::2]}, "along D"),
        ({"alive": torch.ones(2)}, "alive"),
    ],
)
def test_new_tokens_that_do_not_fit_are_refused(changes, said):
    fitting = {
        "k_new": torch.zeros(1, 2, 1, 16),
        "v_new": torch.zeros(1, 2, 1, 16),
        "k": torch.zeros(10, 16),
        "starts": torch.tensor([0, 5]),
        "alive": torch.ones(1),
        "copies": 1,
    }
    check_new_tokens(**fitting)
    with pytest.raises(ValueError, match=said):
        check_new_tokens(**{**fitting, **changes})


@pytest.mark.parametrize(
    "q, extra, said",
    [
        (torch.zeros(2, 17, 16), {}, "17"),
        (torch.zeros(3, 4, 16), {}, "q must be"),
        (torch.zeros(2, 4, 16).half(), {}, "float16"),
        (torch.zeros(2, 4, 16), {"out": torch.zeros(2, 4, 8)}, "out"),
    ],
)
def test_queries_and_outputs_that_do_not_fit_are_refused(q, extra, said):
    pytest.importorskip("triton")
    from kvfactory.kernels.decode_attention import decode_attention

    with pytest.raises(ValueError, match=said):
        decode_attention(q, **held(), scale=1.0, **extra)


def test_a_workspace_of_another_shape_is_refused():
    pytest.importorskip("triton")
    from kvfactory.kernels.decode_attention import decode_attention
    from kvfactory.kernels.segments import DecodeWorkspace

    other = DecodeWorkspace.allocate(2, 3, 16, splits=2, device="cpu")
    with pytest.raises(ValueError, match="workspace"):
        decode_attention(torch.zeros(2, 4, 16), **held(), scale=1.0, workspace=other)


def test_definition_of_the_fused_step_by_hand():
    """Two equal keys: the output is the mean of old and new value; the dead row sees its old one only."""
    k, v = torch.ones(4, 1), torch.tensor([[2.0], [9.0], [2.0], [9.0]])
    starts, lengths = torch.tensor([0, 2]), torch.tensor([1, 1])
    new = (torch.ones(2, 1, 1, 1), torch.full((2, 1, 1, 1), 4.0))
    alive = torch.tensor([True, False])
    out = reference.append_and_attend(torch.ones(2, 1, 1), *new, k, v, starts, lengths, alive, copies=1, scale=1.0)
    assert out.flatten().tolist() == [3.0, 2.0]
    assert v.flatten().tolist() == [2.0, 4.0, 2.0, 9.0] and lengths.tolist() == [1, 1]


def test_kernels_interpreted():
    run_cases("decode_attention_cases.py", interpreted=True)


@pytest.mark.gpu
@needs_cuda
def test_kernels_on_the_gpu():
    run_cases("decode_attention_cases.py", interpreted=False)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mean", [2048, 32768])
def test_a_replayed_graph_of_uneven_segments(dtype, mean):
    """Two rows of 8 kv heads whose lengths spread 1 to 15, as AdaKV leaves them: append, attend, advance, ten times."""
    from kvfactory.kernels.decode_attention import append_and_attend
    from kvfactory.kernels.segments import make_workspace

    R, Hk, G, D, steps = 2, 8, 4, 128, 10
    random = torch.Generator().manual_seed(mean)
    lengths = torch.linspace(mean / 8, mean * 15 / 8, R * Hk).long()[torch.randperm(R * Hk, generator=random)]
    starts = (lengths + steps).cumsum(0) - lengths - steps
    k, v = torch.randn(2, int((lengths + steps).sum()), D, generator=random).to("cuda", dtype)
    tokens = torch.randn(steps, 2, R, Hk, 1, D, generator=random).to("cuda", dtype)
    asked = torch.randn(steps, R * Hk, G, D, generator=random).to("cuda", dtype)
    starts, lengths = starts.cuda(), lengths.cuda()
    alive = torch.ones(R, dtype=torch.bool, device="cuda")
    q, new = asked[0].clone(), tokens[0].clone()
    scratch = make_workspace(R * Hk, G, D, capacity=int(lengths.max()) + steps, device=torch.device("cuda:0"))
    grown, kept_k, kept_v = lengths.clone(), k.clone(), v.clone()

    def step():
        out = append_and_attend(q, *new, k, v, starts, lengths, alive, copies=1, scale=D**-0.5, workspace=scratch)
        lengths.add_(1)
        return out

    step()  # compiles
    lengths.copy_(grown)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for t in range(steps):
        q.copy_(asked[t])
        new.copy_(tokens[t])
        graph.replay()
        reference.append_tokens(*tokens[t], kept_k, kept_v, starts, grown, alive, copies=1)
        grown += 1
        where = (starts, grown)
        plain = reference.decode_by_segment(asked[t], kept_k, kept_v, *where, scale=D**-0.5)
        exact = reference.decode_by_segment(asked[t].double(), kept_k.double(), kept_v.double(), *where, scale=D**-0.5)
        result = compare(f"step {t}", out, plain, exact)
        assert result.passed, result
    assert torch.equal(k, kept_k) and torch.equal(v, kept_v) and torch.equal(lengths, grown)


@pytest.mark.gpu
@needs_cuda
def test_repeated_calls_are_bit_equal():
    """Programs arrive in any order; the join reads their parts in the same order. A moving result would be a race."""
    from kvfactory.kernels.decode_attention import decode_attention
    from kvfactory.kernels.segments import make_workspace

    S, G, D = 24, 4, 128
    k, v = torch.randn(2, S * 3000, D, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(S, G, D, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(S, device="cuda") * 3000
    lengths = torch.randint(1, 3000, (S,), device="cuda")
    scratch = make_workspace(S, G, D, capacity=3000, device=torch.device("cuda:0"))
    first = decode_attention(q, k, v, starts, lengths, scale=0.1, workspace=scratch)
    for _ in range(200):
        assert torch.equal(first, decode_attention(q, k, v, starts, lengths, scale=0.1, workspace=scratch))
