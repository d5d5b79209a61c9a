"""Each kernel against the ceilings of the device and against library kernels that compute the same.

python -m benchmarks.bench_kernels --output kernels.jsonl
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import arguments
from benchmarks.kernel_bench import Bench
from benchmarks.prompt_kernels import bench_columns, bench_lengths, bench_prefill, bench_window
from benchmarks.timing import Log, table, wall_seconds
from kvfactory.kernels import reference
from kvfactory.kernels.dispatch import decode_kernels, gather_kernel, use_triton
from kvfactory.kernels.segments import DecodeWorkspace, choose_splits
from kvfactory.settings import whole_number

KERNELS = ("copy", "matmul", "decode", "append", "gather", "window", "columns", "prefill", "lengths")
LAYOUTS = ("dense", "ragged", "aliased")


def segments(layout: str, rows: int, bench: Bench, length: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(starts, lengths, slots, queries per segment); each segment has one free slot behind it.

    dense: kv heads of equal length; ragged: lengths from an eighth to fifteen eighths of the mean, in random order;
    aliased: a segment for every query head, those of a group on the same slots.
    """
    group = bench.heads // bench.kv_heads
    S = rows * bench.kv_heads
    lengths = torch.full((S,), length)
    if layout == "ragged":
        order = torch.randperm(S, generator=torch.Generator().manual_seed(bench.args.seed))
        lengths = torch.linspace(length / 8, 15 * length / 8, S).long()[order].clamp(min=1)
    starts = (lengths + 1).cumsum(0) - (lengths + 1)
    slots = int((lengths + 1).sum())
    if layout == "aliased":
        starts, lengths, group = starts.repeat_interleave(group), lengths.repeat_interleave(group), 1
    return starts.to(bench.device), lengths.to(bench.device), slots, group


def bench_decode(bench: Bench, layout: str, rows: int, length: int) -> None:
    """append_and_attend at several splits and decode_attention, beside sdpa, FA3 and the torch definition."""
    starts, lengths, slots, group = segments(layout, rows, bench, length)
    S, D = len(starts), bench.head_dim
    stored = slots * D * 2 * bench.dtype.itemsize
    flop = 4.0 * int(lengths.sum()) * group * D
    buffers = [(bench.normal(slots, D), bench.normal(slots, D)) for _ in bench.copies(stored)]
    q, new = bench.normal(S, group, D), bench.normal(2, rows, bench.kv_heads, 1, D)
    alive = torch.ones(rows, dtype=torch.bool, device=bench.device)
    scale, copies = D**-0.5, S // (rows * bench.kv_heads)
    kernels = decode_kernels(bench.device)
    facts = {"layout": layout, "rows": rows, "length": length}
    chosen = None
    splits: list[int | None] = [None]
    if use_triton(bench.device):
        processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
        chosen = choose_splits(S, int(lengths.max()) + 1, processors)
        splits = sorted({chosen} | {s for s in (chosen // 2, chosen * 2, *bench.args.splits) if 1 <= s <= 128})
    for count in splits:
        workspace = None if count is None else DecodeWorkspace.allocate(S, group, D, splits=count, device=bench.device)
        bench.record(
            "append_and_attend",
            facts | {"splits": count, "chosen": count == chosen},
            lambda workspace=workspace: [
                lambda k=k, v=v: kernels.append_and_attend(
                    q, *new, k, v, starts, lengths, alive, copies=copies, scale=scale, workspace=workspace
                )
                for k, v in buffers
            ],
            stored,
            flop,
        )
    workspace = kernels.make_workspace(S, group, D, capacity=int(lengths.max()) + 1, device=bench.device)
    bench.record(
        "decode_attention",
        facts,
        lambda: [
            lambda k=k, v=v: kernels.decode_attention(q, k, v, starts, lengths, scale=scale, workspace=workspace)
            for k, v in buffers
        ],
        stored,
        flop,
    )
    if layout == "dense":
        shaped = [tuple(x.view(rows, bench.kv_heads, length + 1, D)[:, :, :length] for x in pair) for pair in buffers]
        wide = q.view(rows, bench.heads, 1, D)
        bench.record(
            "sdpa, grouped",
            facts,
            lambda: [lambda k=k, v=v: F.scaled_dot_product_attention(wide, k, v, enable_gqa=True) for k, v in shaped],
            stored,
            flop,
        )
        if (flash := bench.fa3()) is not None:
            turned = [tuple(x.transpose(1, 2) for x in pair) for pair in shaped]
            bench.record(
                "FA3",
                facts,
                lambda: [lambda k=k, v=v: flash(wide.transpose(1, 2), k, v, softmax_scale=scale) for k, v in turned],
                stored,
                flop,
            )
    if rows == 1 and bench.device.type == "cuda" and length <= 8192:

        def by_torch() -> list:
            k, v = buffers[0]
            return [lambda: reference.segment_decode(q, k, v, starts, lengths, scale=scale)]

        # It asks the host for lengths, so it cannot be captured: timed as launched.
        bench.log.case(
            {"kind": "kernel", "kernel": "torch definition, launched"} | facts,
            lambda: {"us": round(_launched_us(by_torch()[0], bench.device), 2)},
        )


def _launched_us(call: Callable[[], Any], device: torch.device) -> float:
    call()
    return sorted(wall_seconds(call, device) for _ in range(5))[2] * 1e6


def bench_append(bench: Bench, rows: int, length: int) -> None:
    """append_tokens alone: what the fused kernel saves."""
    starts, lengths, slots, _ = segments("dense", rows, bench, length)
    D = bench.head_dim
    new = bench.normal(2, rows, bench.kv_heads, 1, D)
    alive = torch.ones(rows, dtype=torch.bool, device=bench.device)
    append = decode_kernels(bench.device).append_tokens
    k, v = bench.normal(slots, D), bench.normal(slots, D)
    bench.record(
        "append_tokens",
        {"rows": rows, "length": length},
        lambda: [lambda: append(*new, k, v, starts, lengths, alive, copies=1)],
        4 * new.numel() * new.element_size() / 2,
        0,
    )


def bench_gather(bench: Bench, layout: str, stored_heads: int, length: int, kept: int) -> None:
    """gather_kept of one prompt's layer, beside the torch definition: kept rows read once and written once.

    ragged: from an eighth to fifteen eighths of `kept` per stored head, `kept` on average.
    """
    D, slack = bench.head_dim, 128
    lengths = torch.full((stored_heads,), kept)
    if layout == "ragged":
        lengths = torch.linspace(kept / 8, min(15 * kept / 8, length), stored_heads).long().clamp(min=1)
    ends = lengths.cumsum(0).to(bench.device) if layout == "ragged" else None

    def positions() -> torch.Tensor:
        order = torch.rand(stored_heads, length, generator=bench.random, device=bench.device).argsort(-1)
        parts = [row[:n].sort().values for row, n in zip(order, lengths.tolist(), strict=True)]
        return torch.cat(parts) if layout == "ragged" else torch.stack(parts)[None]

    one, moved = (2 * rows * D * bench.dtype.itemsize for rows in (length * bench.kv_heads, int(lengths.sum())))
    # As models leave them: tokens before heads.
    prompts = [bench.normal(2, 1, length, bench.kv_heads, D).transpose(2, 3) for _ in bench.copies(one)]
    cases = [
        (prompt, positions(), bench.normal(2, int(lengths.sum()) + slack * stored_heads, D))
        for _, prompt in zip(bench.copies(moved), itertools.cycle(prompts), strict=False)
    ]
    facts = {"layout": layout, "stored_heads": stored_heads, "length": length, "kept": kept}
    for name, gather in (("gather_kept", gather_kernel(bench.device)), ("gather_kept, torch", reference.gather_kept)):
        calls = [lambda case=case, gather=gather: gather(*case, slack=slack, ends=ends) for case in cases]
        bench.record(name, facts, lambda calls=calls: calls, 2 * moved, 0)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a value that cannot be."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--kernels", default=",".join(KERNELS))
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    flags.add_argument("--heads", type=whole_number, default=32)
    flags.add_argument("--kv_heads", type=whole_number, default=8)
    flags.add_argument("--head_dim", type=whole_number, default=128)
    flags.add_argument("--lengths", default="2176,8192,32768,131072", help="slots per segment, of decode and append")
    flags.add_argument("--prompts", default="8192,32768,131072", help="of gather, the score kernels and prefill")
    flags.add_argument("--kept", default="128,2048", help="tokens that gather keeps of a prompt, per stored head")
    flags.add_argument("--rows", default="1,16")
    flags.add_argument("--layouts", default=",".join(LAYOUTS))
    flags.add_argument("--splits", default="8,16,32", help="tried beside the chosen one, its half and its double")
    flags.add_argument("--windows", default="8,32")
    flags.add_argument("--repeats", type=whole_number, default=20)
    flags.add_argument("--seed", type=whole_number, default=0)
    flags.add_argument("--output", help="file that the JSON lines are appended to")
    args = flags.parse_args(argv)
    args.kernels = arguments.names("kernels", args.kernels, KERNELS)
    args.layouts = arguments.names("layouts", args.layouts, LAYOUTS)
    for name in ("lengths", "prompts", "kept", "rows", "splits", "windows"):
        setattr(args, name, arguments.counts(name, getattr(args, name)))
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads {args.heads} is not a multiple of --kv_heads {args.kv_heads}")
    return args


@torch.no_grad()
def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = arguments.device_of(args)
    log = Log(args.output, device)
    bench = Bench(args, log, device)
    for name in ("copy", "matmul"):
        if name in args.kernels:
            bench.ceiling(name)
    sizes = list(itertools.product(args.rows, args.lengths))
    work: dict[str, Callable[[], Any]] = {
        "decode": lambda: [
            _guarded(log, "decode", bench_decode, bench, layout, *size)
            for layout in args.layouts
            for size in sizes
            if _fits(bench, *size)
        ],
        "append": lambda: [
            _guarded(log, "append", bench_append, bench, *size) for size in sizes if _fits(bench, *size)
        ],
        "gather": lambda: [
            _guarded(log, "gather", bench_gather, bench, *case)
            for case in itertools.product(args.layouts, (args.kv_heads, args.heads), args.prompts, args.kept)
            if case[0] != "aliased" and case[3] <= case[2]
        ],
        "window": lambda: [_guarded(log, "window", bench_window, bench, n) for n in args.prompts],
        "columns": lambda: [_guarded(log, "columns", bench_columns, bench, n) for n in args.prompts],
        "prefill": lambda: [_guarded(log, "prefill", bench_prefill, bench, n) for n in args.prompts],
        "lengths": lambda: [_guarded(log, "lengths", bench_lengths, bench, n) for n in args.prompts],
    }
    for name in args.kernels:
        if name in work:
            work[name]()
    head = [
        "kernel",
        "layout",
        "rows",
        "stored_heads",
        "length",
        "kept",
        "window",
        "splits",
        "chosen",
        "us",
        "tb_per_s",
        "tflop_per_s",
    ]
    head += ["of_ceiling", "error"]
    rows = [[r.get(name) for name in head] for r in log.records if r["kind"] in ("kernel", "ceiling")]
    print(table(head, rows))
    return 1 if log.failed else 0


def _fits(bench: Bench, rows: int, length: int) -> bool:
    """Leaves out what one GPU has no room for: 16 rows of 131,072."""
    return rows * length * bench.kv_heads * bench.head_dim * 2 * bench.dtype.itemsize < 8 * 2**30


def _guarded(log: Log, name: str, measure: Callable[..., None], bench: Bench, *facts: Any) -> None:
    """A case whose inputs cannot even be made is recorded, and the next one runs."""
    try:
        measure(bench, *facts)
    except Exception as error:
        log.failed += 1
        log.write(
            {"kind": "kernel", "kernel": name, "case": list(facts), "error": f"{type(error).__name__}: {error}"[:500]}
        )


if __name__ == "__main__":
    raise SystemExit(arguments.main(run))
