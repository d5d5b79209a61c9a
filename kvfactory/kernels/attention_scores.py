"""What each key of a prompt receives from the query rows, fused: no S x S matrix, no float32 copy of the keys.

Same results as the torch functions of the same names in `kvfactory.ops.scores` and `kvfactory.ops.row_statistics`,
which define them and call these where they run. Two launches each: the rows' softmax statistics, then the sums per key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from kvfactory.kernels.checks import Check, compare
from kvfactory.kernels.score_kernels import column_sums_kernel, row_softmax_kernel

LOG2E = math.log2(math.e)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Blocks:
    """Launch shape: the tile a program holds, the tile it streams, warps, and stages of the streaming pipeline."""

    held: int
    streamed: int
    warps: int = 4
    stages: int = 3


def choose_blocks(dtype: torch.dtype, head_dim: int, *, counts: bool = False, normalised: bool = False) -> Blocks:
    """Tiles that fit the shared memory of one program, 96 KiB, on every GPU from compute capability 8.0 on.

    Args:
        normalised: each row's log-sum-exp is known. On an H200 two stages are then the faster ones (403 against 350
            TFLOP/s at 131,072 tokens), since more programs fit on a multiprocessor.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    if dtype == torch.float32:  # multiplied without matrix units, in registers
        return Blocks(64, 32, 8, 2) if row_bytes <= 256 else Blocks(32, 32, 8, 2)
    if counts:  # float64 probabilities in registers
        return Blocks(64, 32 if row_bytes <= 256 else 16)
    return Blocks(128, 64, stages=2 if normalised else 3) if row_bytes <= 256 else Blocks(64, 64, stages=2)


def supports(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether the kernels take these queries (B, Hq, S, D) and keys (B, Hk, S, D)."""
    return q.dtype == k.dtype and q.dtype in DTYPES and q.shape[-1] <= MAX_HEAD_DIM


def _row_tile(rows: int, group: int, size: int) -> tuple[int, int]:
    """(heads, rows) of a tile of 16 to `size` rows in all: heads of a group share one where their rows fit."""
    per_head = min(triton.next_power_of_2(rows), size)
    heads = min(triton.next_power_of_2(group), size // per_head)
    return heads, max(per_head, 16 // heads)


def _last_dim_dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _softmax_statistics(
    q: torch.Tensor, k: torch.Tensor, rows: int, scale: float, causal: bool, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per split of the keys and each of the last `rows` rows, the largest product and the sum of exponentials below it.

    Returns:
        twice (splits, B, Hq, rows) float32; the number of splits is a power of two. A split may hold no key of a row:
        its maximum is then far below all others and its sum 0.
    """
    B, Hq, S, D = q.shape
    Hk = k.shape[1]
    G = Hq // Hk
    heads, per_head = _row_tile(rows, G, blocks.held)
    programs = B * Hk * triton.cdiv(G, heads), triton.cdiv(rows, per_head)
    wanted = 2 * _processors(q.device) // (programs[0] * programs[1])
    splits = 1
    while splits * 2 <= min(wanted, 32, S // blocks.streamed):
        splits *= 2
    split_keys = triton.cdiv(triton.cdiv(S, splits), blocks.streamed) * blocks.streamed
    top, total = torch.empty(2, splits, B, Hq, rows, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        row_softmax_kernel[(*programs, splits)](
            q,
            k,
            top,
            total,
            *q.stride()[:3],
            *k.stride()[:3],
            S,
            rows,
            Hk,
            G,
            scale * LOG2E,
            split_keys,
            top.stride(0),
            D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_H=heads,
            BLOCK_R=per_head,
            BLOCK_N=blocks.streamed,
            CAUSAL=causal,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return top, total


def _received(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    rows: int,
    columns: int,
    scale: float,
    causal: bool = True,
    count: bool = False,
    lse: torch.Tensor | None = None,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and, with `count`, low weights that the keys [0, columns) receive from the last `rows` rows.

    Returns:
        (B, Hq, columns) float32 and int64.
    """
    q, k = _last_dim_dense(q), _last_dim_dense(k)
    B, Hq, S, D = q.shape
    Hk = k.shape[1]
    G = Hq // Hk
    assert scale > 0, "a row's largest product is its largest logit"
    if lse is None:
        top, total = _softmax_statistics(q, k, rows, scale, causal, blocks or choose_blocks(q.dtype, D))
        splits, split_stride = top.shape[0], top.stride(0)
    else:
        top = total = (lse[:, :, S - rows :] * LOG2E).contiguous()
        splits = split_stride = 0
    blocks = blocks or choose_blocks(q.dtype, D, counts=count, normalised=lse is not None)
    heads, per_head = _row_tile(rows, G, blocks.streamed)
    sums = torch.empty(B, Hq, columns, dtype=torch.float32, device=q.device)
    lows = torch.empty(B, Hq, columns if count else 0, dtype=torch.int64, device=q.device)
    with torch.cuda.device_of(q):
        column_sums_kernel[(B * Hk * triton.cdiv(G, heads), triton.cdiv(columns, blocks.held))](
            q,
            k,
            top,
            total,
            sums,
            lows,
            *q.stride()[:3],
            *k.stride()[:3],
            S,
            rows,
            columns,
            Hk,
            G,
            scale * LOG2E,
            split_stride,
            D=D,
            BLOCK_D=max(16, triton.next_power_of_2(D)),
            BLOCK_H=heads,
            BLOCK_R=per_head,
            BLOCK_N=blocks.held,
            SPLITS=splits,
            CAUSAL=causal,
            COUNT=count,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return sums, lows


def window_scores(q: torch.Tensor, k: torch.Tensor, window: int, *, scale: float) -> torch.Tensor:
    """`kvfactory.ops.scores.window_scores`: (B, Hq, S - window) float32."""
    return _received(q, k, rows=window, columns=q.shape[2] - window, scale=scale)[0]


def column_sums(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int = 0, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """`kvfactory.ops.scores.column_sums`: (B, Hq, S) float32.

    Args:
        lse: (B, Hq, S) float32 natural log-sum-exp of every row's scaled causal logits, which saves the first kernel.
    """
    S = q.shape[2]
    return _received(q, k, rows=S - first_row, columns=S, scale=scale, lse=lse)[0]


def unmasked_sums(q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int) -> torch.Tensor:
    """`kvfactory.ops.row_statistics.unmasked_sums`: (B, Hq, S) float32."""
    S = q.shape[2]
    return _received(q, k, rows=S - first_row, columns=S, scale=scale, causal=False)[0]


def low_weight_counts(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvfactory.ops.row_statistics.low_weight_counts`: counts int64 and sums float32, (B, Hq, S)."""
    S = q.shape[2]
    sums, counts = _received(q, k, rows=S - first_row, columns=S, scale=scale, count=True)
    return counts, sums


def row_normalisers(q: torch.Tensor, k: torch.Tensor, *, scale: float, first_row: int) -> torch.Tensor:
    """`kvfactory.ops.row_statistics.row_normalisers`: (B, Hq, S - first_row) float32."""
    q, k = _last_dim_dense(q), _last_dim_dense(k)
    blocks = choose_blocks(q.dtype, q.shape[-1])
    top, total = _softmax_statistics(q, k, q.shape[2] - first_row, scale, True, blocks)
    return torch.logsumexp(top * scale + total.log(), dim=0)


def _plain_attention(q: torch.Tensor, k: torch.Tensor, scale: float, *, causal: bool = True) -> torch.Tensor:
    """(B, Hq, S, S) probabilities by plain torch in the dtype of q, softmax in float32 or better."""
    S = q.shape[2]
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(2, 3) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.softmax(logits, -1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)


def check(device: torch.device, dtype: torch.dtype) -> list[Check]:
    """Every score on groups of one and of several query heads, head dims with and without padding."""
    results = []
    for B, Hk, G, S, D in ((1, 1, 4, 200, 128), (2, 1, 1, 131, 80)):
        random = torch.Generator().manual_seed(D)
        q = torch.randn(B, Hk * G, S, D, generator=random).to(device, dtype)
        k = torch.randn(B, Hk, S, D, generator=random).to(device, dtype)
        scale, last, case = 2 * D**-0.5, S - 37, f"G={G} D={D}"
        plain, exact = _plain_attention(q, k, scale), _plain_attention(q.double(), k.double(), scale)

        def judge(name: str, got: torch.Tensor, rows: slice, plain: torch.Tensor, exact: torch.Tensor, case=case):
            columns = slice(got.shape[-1])
            sums = (
                x[:, :, rows, columns].to(torch.promote_types(x.dtype, torch.float32)).sum(2) for x in (plain, exact)
            )
            results.append(replace(compare(f"{name} {case}", got, *sums), dtype=dtype))

        judge("window_scores", window_scores(q, k, 8, scale=scale), slice(S - 8, S), plain, exact)
        judge("column_sums", column_sums(q, k, scale=scale), slice(0, S), plain, exact)
        judge("column_sums", column_sums(q, k, scale=scale, first_row=last), slice(last, S), plain, exact)
        lse = exact[..., 0].log().neg() + (q.double() * k.double()[:, :, :1].repeat_interleave(G, 1)).sum(-1) * scale
        judge("column_sums lse", column_sums(q, k, scale=scale, lse=lse.float()), slice(0, S), plain, exact)
        counts, sums = low_weight_counts(q, k, scale=scale, first_row=last)
        judge("low_weight_counts sums", sums, slice(last, S), plain, exact)
        results.append(replace(_judge_counts(f"low_weight_counts {case}", counts, exact, last), dtype=dtype))
        unmasked = (_plain_attention(x, y, scale, causal=False) for x, y in ((q, k), (q.double(), k.double())))
        judge("unmasked_sums", unmasked_sums(q, k, scale=scale, first_row=last), slice(last, S), *unmasked)
    return results


def _judge_counts(name: str, counts: torch.Tensor, exact: torch.Tensor, first_row: int) -> Check:
    """The error is the largest difference that weights within 1e-4 of an even share do not explain."""
    S = exact.shape[-1]
    visible = torch.arange(first_row + 1, S + 1, device=exact.device)[:, None]
    shares = exact[:, :, first_row:] * visible
    seen = torch.arange(S, device=exact.device) < visible
    want = ((shares < 1) & seen).sum(2)
    unclear = ((shares - 1).abs() < 1e-4).sum(2)
    return Check(name, counts.dtype, float(((counts - want).abs() - unclear).max().clamp_min(0)), 0.0)
