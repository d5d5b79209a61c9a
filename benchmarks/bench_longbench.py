"""Examples per minute, prompt to last token, through the rows in flight of the runner; see benchmarks/README.md.

python -m benchmarks.bench_longbench --methods fullkv,snapkv --budgets 2048 --batch_sizes 1,16 --sweep_batch 4
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from benchmarks import arguments
from benchmarks.bench_methods import Case, cases, plan_of
from benchmarks.measure import attached
from benchmarks.models import get_shape, random_ids, random_model, write_head_scores
from benchmarks.timing import Log, gib, peak_memory, synchronize, table
from kvfactory.data.tasks import DEFAULT_DATASETS, TASKS
from kvfactory.generation import generate_rows
from kvfactory.graph_support import graph_obstacle
from kvfactory.monkeypatch import get_attachment
from kvfactory.plan import Plan
from kvfactory.rows import Request
from kvfactory.settings import number, whole_number

SWEEP_METHODS = "snapkv,pyramidkv,h2o,streamingllm,l2norm,adakv,headkv,nacl"
SECONDS_PER_EXAMPLE = {1: 1.3, 16: 0.40}
"""Targets with SnapKV 2,048 at 8,192 + 128 tokens, by batch size."""

ONE_CALL_SHARE = 0.35
"""Target: the time of eight methods x three budgets in one call over that of separate calls."""


def output_lengths(kind: str, new_tokens: int) -> Iterator[int]:
    """New tokens of one example after the other: always the same, or the limits of LongBench's 16 default sets."""
    limits = [TASKS[name].max_new_tokens for name in DEFAULT_DATASETS]
    return itertools.repeat(new_tokens) if kind == "fixed" else itertools.cycle(limits)


def prompt_lengths(kind: str, longest: int, examples: int, seed: int) -> list[int]:
    """Tokens of one prompt after the other: always the same, or drawn between half of that and that."""
    draw = random.Random(seed)
    return [longest if kind == "fixed" else draw.randint(-(-longest // 2), longest) for _ in range(examples)]


def requests(
    model: PreTrainedModel, plans: list[Plan], prompts: list[int], lengths: Iterator[int], seed: int
) -> Iterator[Request]:
    """Prompts made when they are asked for, as the runner encodes its own; nothing stops before its length."""
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=False)):
        yield Request(random_ids(model, prompt, seed + i), length, 0, [], plans, example_id=f"benchmark/{i}")


def generate_all(model: PreTrainedModel, stream: Iterator[Request], batch: int, decode: str) -> dict[str, Any]:
    """Seconds until every row is out, and how many rows and tokens there were.

    Raises:
        Exception: what a row raised.
    """
    rows = tokens = 0
    with peak_memory(model.device) as peak:
        synchronize(model.device)
        start = time.perf_counter()
        for _, output, _ in generate_rows(model, stream, batch_size=batch, decode=decode, keep_caches=False):
            if isinstance(output, Exception):
                raise output
            rows, tokens = rows + 1, tokens + len(output.tokens)
        synchronize(model.device)
        seconds = time.perf_counter() - start
    return {"seconds": round(seconds, 4), "rows": rows, "new_tokens": tokens, "peak_extra_gib": gib(peak.extra)}


def checked_decode(model: PreTrainedModel, plans: list[Plan], decode: str) -> None:
    """Raises ValueError where a plan would quietly decode in the loop."""
    if decode == "graph":
        for plan in plans:
            if why := graph_obstacle(get_attachment(model), plan, model.device, model.dtype):
                raise ValueError(f"--decode graph: {plan.method}: {why}")


def measure_rate(args: argparse.Namespace, model: PreTrainedModel, plan: Plan, batch: int) -> dict[str, Any]:
    """Seconds per example with a captured step that was there before, as in any run of more than a few examples."""
    lengths = output_lengths(args.output_lengths, args.new_tokens)
    longest = max(itertools.islice(output_lengths(args.output_lengths, args.new_tokens), len(DEFAULT_DATASETS)))
    with attached(model, plan, args.attn_implementation):
        checked_decode(model, [plan], args.decode)
        warm_up = requests(model, [plan], [args.prompt], itertools.repeat(longest), args.seed)
        first = generate_all(model, warm_up, batch, args.decode)
        examples = max(args.examples, 2 * batch) if batch > 1 else args.examples
        prompts = prompt_lengths(args.prompt_lengths, args.prompt, examples, args.seed)
        facts = generate_all(model, requests(model, [plan], prompts, lengths, args.seed), batch, args.decode)
    seconds = facts["seconds"] / examples
    return facts | {
        "first_example_s": first["seconds"],
        "seconds_per_example": round(seconds, 4),
        "examples_per_minute": round(60 / seconds, 2),
    }


def measure_sweep(args: argparse.Namespace, model: PreTrainedModel, plans: list[Plan]) -> dict[str, Any]:
    """All plans in one call against a call for each, over the same examples at the same `--sweep_batch`.

    Captures count on both sides: a separate call makes its own, and so does the joint one.
    """
    size = args.sweep_batch

    def stream(chosen: list[Plan]) -> Iterator[Request]:
        return requests(model, chosen, [args.prompt] * size, itertools.repeat(args.new_tokens), args.seed)

    # As the runner does: at batch 1 rows decode one after the other, else every plan brings its own rows.
    joint_batch = size * len(plans) if size > 1 else 1
    with attached(model, plans[0], args.attn_implementation):
        checked_decode(model, plans, args.decode)
        together = generate_all(model, stream(plans), joint_batch, args.decode)
    apart = []
    for plan in plans:
        with attached(model, plan, args.attn_implementation):
            apart.append(generate_all(model, stream([plan]), size, args.decode)["seconds"])
    return {
        "plans": len(plans),
        "examples": size,
        "together_s": together["seconds"],
        "together_peak_extra_gib": together["peak_extra_gib"],
        "apart_s": round(sum(apart), 4),
        "apart_each_s": apart,
        "share": round(together["seconds"] / sum(apart), 4),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a value that cannot be."""
    flags = arguments.parser(__doc__.splitlines()[0])
    flags.add_argument("--methods", default="fullkv,snapkv")
    flags.add_argument("--budgets", default="2048")
    flags.add_argument("--batch_sizes", default="1,16", help="as --eval_batch_size of the runner")
    flags.add_argument("--prompt", type=whole_number, default=8192)
    flags.add_argument(
        "--prompt_lengths", default="fixed", choices=("fixed", "varied"), help="varied: from half of --prompt up to it"
    )
    flags.add_argument("--new_tokens", type=whole_number, default=128)
    flags.add_argument(
        "--output_lengths", default="fixed", choices=("fixed", "longbench"), help="longbench: its sets' limits in turn"
    )
    flags.add_argument(
        "--examples", type=whole_number, default=6, help="timed examples; at least two batches where batched"
    )
    flags.add_argument("--decode", choices=("graph", "loop"), help="default graph on CUDA, loop on the CPU")
    flags.add_argument("--attn_implementation", default="sdpa")
    flags.add_argument("--sweep_methods", default=SWEEP_METHODS, help="of the one call against separate calls")
    flags.add_argument("--sweep_budgets", default="128,512,2048")
    flags.add_argument(
        "--sweep_batch", type=whole_number, default=0, help="examples in flight of that comparison; 0 leaves it out"
    )
    flags.add_argument("--query_spread", type=number, default=30.0, help="query scales from 1 to this over heads")
    args = flags.parse_args(argv)
    args.methods = arguments.methods(args.methods)
    args.sweep_methods = arguments.methods(args.sweep_methods)
    args.budgets = arguments.counts("budgets", args.budgets)
    args.sweep_budgets = arguments.counts("sweep_budgets", args.sweep_budgets)
    args.batch_sizes = arguments.counts("batch_sizes", args.batch_sizes)
    args.decode = args.decode or ("graph" if args.device == "cuda" else "loop")
    for name, least in (("prompt", 1), ("new_tokens", 2), ("examples", 1), ("sweep_batch", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)} is not at least {least}")
    return args


def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = arguments.device_of(args)
    log = Log(args.output, device)
    model = random_model(
        args.model, device, arguments.dtype_of(args), layers=args.layers, seed=args.seed, query_spread=args.query_spread
    )
    with tempfile.TemporaryDirectory() as folder:
        heads = get_shape(args.model).heads
        head_path = write_head_scores(
            Path(folder) / "random_head_scores.json", len(model.model.layers), heads, args.seed
        )

        def planned(case: Case) -> Plan:
            return plan_of(case, head_path, args.attn_implementation)

        for case in cases(args.methods, args.budgets, ["kv_head"], args.prompt):
            for batch in args.batch_sizes:
                facts = {"kind": "rate"} | case._asdict() | {"prompt": args.prompt, "batch": batch}
                facts |= {"decode": args.decode, "output_lengths": args.output_lengths}
                facts |= {"prompt_lengths": args.prompt_lengths}
                log.case(facts, lambda case=case, batch=batch: measure_rate(args, model, planned(case), batch))
        if args.sweep_batch:
            swept = list(cases(args.sweep_methods, args.sweep_budgets, ["kv_head"], args.prompt))
            facts = {"kind": "sweep", "prompt": args.prompt, "decode": args.decode}
            log.case(facts, lambda: measure_sweep(args, model, [planned(case) for case in swept]))
    print(report(log.records))
    return 1 if log.failed else 0


def report(records: list[dict[str, Any]]) -> str:
    head = ["method", "budget", "batch", "seconds_per_example", "examples_per_minute", "peak_extra_gib", "error"]
    rows, verdicts = [], []
    for record in records:
        if record["kind"] == "rate":
            rows.append([record.get(name) for name in head])
        case = [record.get(name) for name in ("method", "budget", "prompt", "prompt_lengths", "output_lengths")]
        value, limit, target = None, None, None
        if case == ["SnapKV", 2048, 8192, "fixed", "fixed"] and record["batch"] in SECONDS_PER_EXAMPLE:
            value, limit = record.get("seconds_per_example"), SECONDS_PER_EXAMPLE[record["batch"]]
            target = f"seconds per example, batch {record['batch']}"
        elif record["kind"] == "sweep":
            value, limit, target = record.get("share"), ONE_CALL_SHARE, "one call / separate calls"
        if target is not None:
            verdict = "failed" if value is None else "met" if value <= limit else "missed"
            verdicts.append([target, value, limit, verdict])
    return table(head, rows) + "\n\n" + table(["target", "measured", "at most", "verdict"], verdicts)


if __name__ == "__main__":
    raise SystemExit(arguments.main(run))
