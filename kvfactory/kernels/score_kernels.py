"""The two Triton kernels behind `kvfactory.kernels.attention_scores`, which launches them.

`row_softmax_kernel` leaves, for every query row, the maximum of its logits and the sum of their exponentials;
`column_sums_kernel` recomputes the logits for one block of keys at a time and adds up the probabilities of the rows
that see it. A program owns its rows or keys, so nothing is added atomically and results repeat bit for bit. Where the
rows are few, as in an observation window, the first kernel splits the keys over programs, and the query heads of a
group share one tile, so that a key is read once per kv head.

Products of half-precision inputs are exact and added in float32; float32 inputs are multiplied in float32 (no tf32).
Maxima are those of the plain products, so that equal products have equal probabilities whatever the compiler fuses:
p = exp2((q.k - top) * scale * log2(e)) / total. With a log-sum-exp that the attention has left, the second kernel runs
alone and p = exp2(q.k * scale * log2(e) - lse * log2(e)), half as many operations per weight.

Shapes: q (B, Hq, S, D) and k (B, Hk, S, D) by strides, the last one 1; the rows are the last R of S; a tile of rows
holds BLOCK_H heads of one group and BLOCK_R rows of each. Offsets are 64 bits wide wherever they grow with S.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-1.0e30)  # below every logit, and finite: a row that sees nothing has no inf - inf
_BELOW_AVERAGE = tl.constexpr(1 - 1e-6)  # kvfactory.ops.row_statistics.BELOW_AVERAGE


# Lengths change from prompt to prompt: not a reason to compile anew.
@triton.jit(do_not_specialize=["S", "R", "split_keys", "split_stride"])
def row_softmax_kernel(
    q_ptr,
    k_ptr,
    top_ptr,
    total_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    S,
    R,
    Hk,
    G,
    scale,
    split_keys,
    split_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Grid (head tiles, row tiles, splits). top, total: (splits, B, Hq, R) over the keys of one split; scale > 0."""
    tiles = tl.cdiv(G, BLOCK_H)
    kv = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = kv // Hk, kv % Hk
    m = tl.arange(0, BLOCK_H * BLOCK_R)
    member = (tl.program_id(0) % tiles) * BLOCK_H + m // BLOCK_R  # of the group
    head = kv_head * G + member
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R  # the longest rows start first
    r = first + m % BLOCK_R
    valid = (r < R) & (member < G)
    row = S - R + r
    d = tl.arange(0, BLOCK_D)
    q_ptrs = q_ptr + batch * q_batch + (head * q_head + row.to(tl.int64) * q_row)[:, None] + d[None, :]
    q = tl.load(q_ptrs, mask=valid[:, None] & (d < D)[None, :], other=0.0)

    # Keys below `open_to` are seen by every row of the tile and need no mask, those from `stop` on by none.
    start = tl.program_id(2) * split_keys
    stop = tl.minimum(start + split_keys, S)
    if CAUSAL:
        stop = tl.minimum(stop, S - R + first + BLOCK_R)
        open_to = tl.minimum(S - R + first + 1, stop)
    else:
        open_to = stop
    open_to = start + tl.maximum(open_to - start, 0) // BLOCK_N * BLOCK_N

    top = tl.full((BLOCK_H * BLOCK_R,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_H * BLOCK_R,), tl.float32)
    n = tl.arange(0, BLOCK_N)
    k_tile = k_ptr + batch * k_batch + kv_head * k_head + n.to(tl.int64)[None, :] * k_row + d[:, None]
    for masked in tl.static_range(2):
        lo = open_to if masked else start
        hi = stop if masked else open_to
        for n0 in range(lo, hi, BLOCK_N):
            inside = n0 + n < S
            offset = tl.cast(n0, tl.int64) * k_row
            k = tl.load(k_tile + offset, mask=inside[None, :] & (d < D)[:, None], other=0.0)
            x = tl.dot(q, k, input_precision="ieee")
            if masked:
                seen = inside[None, :]
                if CAUSAL:
                    seen = seen & (n0 + n[None, :] <= row[:, None])
                x = tl.where(seen, x, float("-inf"))
            raised = tl.maximum(top, tl.max(x, 1))
            total = total * tl.exp2((top - raised) * scale) + tl.sum(tl.exp2((x - raised[:, None]) * scale), 1)
            top = raised

    out = tl.program_id(2).to(tl.int64) * split_stride + (batch * Hk * G + head) * R + r
    tl.store(top_ptr + out, top, mask=valid)
    tl.store(total_ptr + out, total, mask=valid)


@triton.jit
def _per_head(x, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """(BLOCK_N, BLOCK_H * BLOCK_R) summed over the rows of each head -> (BLOCK_N, BLOCK_H)."""
    if BLOCK_H == 1:
        sums = tl.sum(x, 1)[:, None]
    else:
        sums = tl.sum(tl.reshape(x, (BLOCK_N, BLOCK_H, BLOCK_R)), 2)
    return sums


@triton.jit(do_not_specialize=["S", "R", "columns", "split_stride"])
def column_sums_kernel(
    q_ptr,
    k_ptr,
    top_ptr,
    total_ptr,
    sum_ptr,
    low_ptr,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    S,
    R,
    columns,
    Hk,
    G,
    scale,
    split_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Grid (head tiles, key blocks). sums float32 and low int64: (B, Hq, columns); low with COUNT only.

    SPLITS 0: top is the log-sum-exp in base 2, (B, Hq, R) float32, and total is not read.
    """
    tiles = tl.cdiv(G, BLOCK_H)
    kv = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = kv // Hk, kv % Hk
    member0 = (tl.program_id(0) % tiles) * BLOCK_H
    m = tl.arange(0, BLOCK_H * BLOCK_R)
    member = member0 + m // BLOCK_R
    head = kv_head * G + member
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k_ptrs = k_ptr + batch * k_batch + kv_head * k_head + n.to(tl.int64)[:, None] * k_row + d[None, :]
    k = tl.load(k_ptrs, mask=(n < S)[:, None] & (d < D)[None, :], other=0.0)
    q_tile = q_ptr + batch * q_batch + (head * q_head)[None, :] + d[:, None]
    stat_tile = (batch * Hk * G + head) * R

    # Row tiles before `begin` see none of these keys, those from `open_from` on see all of them.
    row_tiles = tl.cdiv(R, BLOCK_R)
    begin = 0
    open_from = 0
    if CAUSAL:
        begin = tl.maximum(n0 - (S - R), 0) // BLOCK_R
        open_from = tl.minimum(tl.cdiv(tl.maximum(n0 + BLOCK_N - 1 - (S - R), 0), BLOCK_R), row_tiles)

    # Added up in float64 over the tiles, which costs one addition per key and tile.
    sums = tl.zeros((BLOCK_N, BLOCK_H), tl.float64)
    lows = tl.zeros((BLOCK_N, BLOCK_H), tl.int32)
    for unmasked in tl.static_range(2):
        lo = open_from if unmasked else begin
        hi = row_tiles if unmasked else open_from
        for tile in range(lo, hi):
            r = tile * BLOCK_R + m % BLOCK_R
            valid = (r < R) & (member < G)
            row = S - R + r
            q_ptrs = q_tile + (row.to(tl.int64) * q_row)[None, :]
            q = tl.load(q_ptrs, mask=valid[None, :] & (d < D)[:, None], other=0.0)
            x = tl.dot(k, q, input_precision="ieee")
            at = stat_tile + r
            if SPLITS == 0:
                lse = tl.load(top_ptr + at, mask=valid, other=float("inf"))
                p = tl.exp2(x * scale - lse[None, :])
            else:
                if SPLITS == 1:
                    top = tl.load(top_ptr + at, mask=valid, other=0.0)
                    total = tl.load(total_ptr + at, mask=valid, other=1.0)
                else:
                    parts = at[:, None] + tl.arange(0, SPLITS).to(tl.int64)[None, :] * split_stride
                    tops = tl.load(top_ptr + parts, mask=valid[:, None], other=0.0)
                    totals = tl.load(total_ptr + parts, mask=valid[:, None], other=1.0)
                    top = tl.max(tops, 1)
                    total = tl.sum(totals * tl.exp2((tops - top[:, None]) * scale), 1)
                inverse = tl.where(valid, 1.0 / total, 0.0)
                # The first kernel may have rounded otherwise: no product exceeds its row's maximum.
                p = tl.exp2(tl.minimum(x - top[None, :], 0.0) * scale) * inverse[None, :]
            if CAUSAL and not unmasked:
                p = tl.where(n[:, None] <= row[None, :], p, 0.0)
            if COUNT:
                low = (p * (row + 1).to(tl.float32)[None, :] < _BELOW_AVERAGE) & valid[None, :]
                low = low & (n[:, None] <= row[None, :])
                lows += _per_head(low.to(tl.int32), BLOCK_N, BLOCK_H, BLOCK_R)
                # In float64 throughout, so that sums that are equal in exact arithmetic come out equal and tie.
                sums += _per_head(p.to(tl.float64), BLOCK_N, BLOCK_H, BLOCK_R)
            else:
                sums += _per_head(p, BLOCK_N, BLOCK_H, BLOCK_R).to(tl.float64)

    h = member0 + tl.arange(0, BLOCK_H)
    out = ((batch * Hk * G + kv_head * G + h) * columns)[None, :] + n[:, None]
    inside = (n < columns)[:, None] & (h < G)[None, :]
    tl.store(sum_ptr + out, sums.to(tl.float32), mask=inside)
    if COUNT:
        tl.store(low_ptr + out, lows.to(tl.int64), mask=inside)
