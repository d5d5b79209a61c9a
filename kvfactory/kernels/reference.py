"""The torch definition of every kernel: what a fused version must compute, and the path where none runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfactory.kernels.checks import Check, compare, equal


def segment_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    *,
    scale: float,
    chunk_bytes: int = 256 * 2**20,
) -> torch.Tensor:
    """Attention of G queries per segment over that segment's slots, without padding.

    Args:
        q: (S, G, D), S segments.
        k, v: (slots, D); segment s owns the slots start[s] .. start[s] + length[s] - 1; segments may share slots.
        start, length: (S,) int64, length >= 1.
        chunk_bytes: bound on the float32 products held at once.

    Returns:
        (S, G, D) in q's dtype; softmax in float32.
    """
    S, G, D = q.shape
    segment = torch.repeat_interleave(torch.arange(S, device=q.device), length)
    first = torch.repeat_interleave(start - (length.cumsum(0) - length), length)
    slot = first + torch.arange(segment.numel(), device=q.device)
    logits = torch.empty(segment.numel(), G, dtype=torch.float32, device=q.device)
    chunk = max(1, chunk_bytes // (8 * G * D))
    for i in range(0, segment.numel(), chunk):
        part = slice(i, i + chunk)
        logits[part] = (q[segment[part]].float() * k[slot[part]].float()[:, None]).sum(-1) * scale
    index = segment[:, None].expand(-1, G)
    top = torch.full((S, G), -torch.inf, device=q.device).scatter_reduce_(0, index, logits, "amax")
    weight = (logits - top[segment]).exp_()
    total = torch.zeros(S, G, device=q.device).index_add_(0, segment, weight)
    out = torch.zeros(S, G, D, device=q.device)
    for i in range(0, segment.numel(), chunk):
        part = slice(i, i + chunk)
        out.index_add_(0, segment[part], weight[part, :, None] * v[slot[part]].float()[:, None])
    return (out / total[..., None]).to(q.dtype)


def decode_by_segment(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """`segment_decode` as one matrix product after the other per segment, each rounded to the inputs' dtype.

    What kernels are measured by: in float64 it is exact, in half precision as good as eager attention. Asks the device
    for every length.
    """
    out = torch.empty_like(q)
    for s, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        part = slice(start, start + length)
        logits = q[s] @ k[part].T * scale
        weights = torch.softmax(logits, -1, dtype=torch.promote_types(q.dtype, torch.float32))
        out[s] = weights.to(q.dtype) @ v[part]
    return out


def append_tokens(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    alive: torch.Tensor,
    *,
    copies: int,
) -> None:
    """Writes the new token of each row behind all its segments, in place; `lengths` stay as they are.

    Args:
        k_new, v_new: (R, Hk, 1, D).
        k, v: (slots, D), with a free slot at starts[s] + lengths[s].
        starts, lengths: (S,) with S = R * Hk * copies, ordered by row, kv head, copy. Segments that share slots write
            the same value twice.
        alive: (R,) bool or integers; a dead row writes nothing, so it needs no free slot.
        copies: segments per kv head: 1, or Hq / Hk where query heads are stored.
    """
    writes = alive.bool().repeat_interleave(starts.shape[0] // alive.shape[0])
    # A dead row puts back what its first slot holds: no choice of rows on the host, no slot beyond the buffer.
    slots = torch.where(writes, starts + lengths, starts)
    for buffer, x in ((k, k_new), (v, v_new)):
        x = x.repeat_interleave(copies, dim=1).reshape(-1, x.shape[-1])
        buffer.index_copy_(0, slots, torch.where(writes[:, None], x, buffer[slots]))


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: None = None,
) -> torch.Tensor:
    """`segment_decode` under the kernel's signature; there is no workspace to pass."""
    result = segment_decode(q, k, v, starts, lengths.long(), scale=scale)
    return result if out is None else out.copy_(result)


def append_and_attend(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    alive: torch.Tensor,
    *,
    copies: int,
    scale: float,
    out: torch.Tensor | None = None,
    workspace: None = None,
) -> torch.Tensor:
    """`append_tokens`, then `decode_attention` over the segments with their new token; `lengths` stay as they are."""
    append_tokens(k_new, v_new, k, v, starts, lengths, alive, copies=copies)
    grown = lengths + alive.to(lengths.dtype).repeat_interleave(starts.shape[0] // alive.shape[0])
    return decode_attention(q, k, v, starts, grown, scale=scale, out=out)


def gather_kept(
    sources: Sequence[torch.Tensor],
    indices: torch.Tensor,
    targets: Sequence[torch.Tensor],
    *,
    slack: int,
    ends: torch.Tensor | None = None,
) -> None:
    """Copies rows of the sources to their slots, segment after segment.

    Args:
        sources: (B, Hk, S, D) each, at any strides.
        indices: (B, Hs, n), or with `ends` (N,): positions in S, segment after segment. Segment s of B * Hs reads kv
            head s // (Hs / Hk), and its rows lie `slack * s` slots further on in the target than here.
        targets: (slots, D), one per source, in its dtype. Slack is not touched.
        ends: (B * Hs,) where segments end in `indices`. Rows behind the last one belong to none: they have to be
            positions, and may be copied behind the last segment's slack or not.
    """
    rows = torch.arange(indices.numel(), device=indices.device)
    segment = rows // indices.shape[-1] if ends is None else torch.searchsorted(ends, rows, right=True)
    segments = indices.shape[0] * indices.shape[1] if ends is None else ends.numel()
    for x, target in zip(sources, targets, strict=True):
        B, Hk = x.shape[:2]
        head = (segment // (segments // (B * Hk))).clamp_(max=B * Hk - 1)
        target.index_copy_(0, rows + slack * segment, x[head // Hk, head % Hk, indices.flatten()])


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """The definitions themselves: decode attention against float64, the append and the gather against a loop."""
    results = []
    for G, D in ((1, 128), (3, 80)):
        random = torch.Generator().manual_seed(G)
        lengths = torch.tensor([1, 5, 130, 257, 2177, 3])
        starts = (lengths + 1).cumsum(0) - lengths - 1
        q = torch.randn(len(lengths), G, D, generator=random).to(device, dtype)
        k, v = (torch.randn(int((lengths + 1).sum()), D, generator=random).to(device, dtype) for _ in range(2))
        new = torch.randn(2, 3, 2, 1, D, generator=random).to(device, dtype)
        where = (starts.to(device), lengths.to(device))
        got = segment_decode(q, k, v, *where, scale=D**-0.5)
        plain = decode_by_segment(q, k, v, *where, scale=D**-0.5)
        exact = decode_by_segment(q.double(), k.double(), v.double(), *where, scale=D**-0.5)
        results.append(compare(f"torch segment_decode G={G} D={D}", got, plain, exact))
        alive = [True, False, True]
        want = k.clone()
        for s, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            if alive[s // 2]:
                want[start + length] = new[0, s // 2, s % 2, 0]
        append_tokens(*new, k, v, *where, torch.tensor(alive, device=device), copies=1)
        results.append(equal(f"torch append_tokens D={D}", k, want))
        prompt = torch.randn(2, 2, 70, D, generator=random).to(device, dtype)
        kept = torch.rand(2, 4, 70, generator=random).argsort(-1)[..., :33].sort().values.to(device)
        got, want = prompt.new_zeros(2 * 4 * 35, D), prompt.new_zeros(2, 4, 35, D)
        for b, h in ((b, h) for b in range(2) for h in range(4)):
            want[b, h, :33] = prompt[b, h // 2][kept[b, h]]
        gather_kept([prompt], kept, [got], slack=2)
        results.append(equal(f"torch gather_kept D={D}", got, want.view(-1, D)))
    return results
