"""Prefill, peak memory and decoding of each method on random weights of a real shape; see benchmarks/README.md.

python -m benchmarks.bench_methods --methods fullkv,snapkv --prompts 8192,32768 --budgets 2048 --output results.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from benchmarks import arguments
from benchmarks.measure import attached, measure_decode, measure_prefill
from benchmarks.models import get_shape, random_ids, random_model, write_head_scores
from benchmarks.peers import KVPRESS_METHODS, PEERS, measure_kvpress, measure_transformers
from benchmarks.targets import judge
from benchmarks.timing import Log, gib, table
from kvfactory.methods import METHODS
from kvfactory.plan import Plan, make_plan
from kvfactory.settings import number, whole_number

DEFAULT_METHODS = "fullkv,snapkv,pyramidkv,h2o,streamingllm,l2norm,adakv,headkv"
GRANULARITIES = ("kv_head", "query_head")


class Case(NamedTuple):
    """One method under one budget; budget and granularity are None where the method does not act on them."""

    method: str
    budget: int | None
    granularity: str | None


def cases(methods: list[str], budgets: list[int], granularities: list[str], prompt: int) -> Iterator[Case]:
    """Every distinct case at a prompt length, in the order given; budgets that drop nothing are left out."""
    seen = set()
    for method in methods:
        capability = METHODS.get(method).capability
        for granularity in granularities:
            for budget in budgets:
                case = Case(
                    method,
                    None if capability.budget_means == "none" else budget,
                    None if capability.same_for_all_heads else granularity,
                )
                if case not in seen and (case.budget is None or case.budget < prompt):
                    seen.add(case)
                    yield case


def plan_of(case: Case, head_path: Path, backend: str) -> Plan:
    settings = {"head_path": str(head_path)} if case.method == "HeadKV" else {}
    return make_plan(
        case.method,
        max_capacity_prompt=case.budget,
        kv_cache_granularity=case.granularity or "kv_head",
        attn_implementation=backend,
        **settings,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a value that cannot be."""
    flags = arguments.parser(__doc__.splitlines()[0])
    flags.add_argument("--methods", default=DEFAULT_METHODS)
    flags.add_argument("--prompts", default="8192,32768,131072", help="prompt lengths in tokens")
    flags.add_argument("--budgets", default="2048", help="kept tokens")
    flags.add_argument("--granularity", default="kv_head", help="kv_head, query_head or both")
    flags.add_argument("--rows", default="1", help="rows in flight; 1,16@32768 has 16 rows at that length only")
    flags.add_argument("--new_tokens", type=whole_number, default=64)
    flags.add_argument("--decode", default=None, help="graph, loop or both; default graph on CUDA, loop on the CPU")
    flags.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}, in the same process")
    flags.add_argument("--attn_implementation", default="sdpa")
    flags.add_argument("--repeats", type=whole_number, default=3, help="timed prompt passes after a warm-up")
    flags.add_argument(
        "--case_seconds", type=number, default=30.0, help="no further pass once a case has taken so long"
    )
    flags.add_argument("--query_spread", type=number, default=30.0, help="query scales from 1 to this over heads")
    flags.add_argument("--head_path", help="HeadKV's scores of this shape; default random uneven ones")
    flags.add_argument("--devices", type=whole_number, default=1, help="GPUs that share the layers")
    args = flags.parse_args(argv)
    args.methods = arguments.methods(args.methods)
    args.prompts = arguments.counts("prompts", args.prompts)
    args.budgets = arguments.counts("budgets", args.budgets)
    args.granularity = arguments.names("granularity", args.granularity, GRANULARITIES)
    args.rows = arguments.row_counts(args.rows)
    args.decode = args.decode or ("graph" if args.device == "cuda" else "loop")
    args.decode = arguments.names("decode", args.decode, ("graph", "loop"))
    args.peers = arguments.names("peers", args.peers, PEERS)
    if args.new_tokens < 8:
        raise ValueError(f"--new_tokens {args.new_tokens} is fewer than 8: the middle half of the steps is timed")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} is not at least 1")
    return args


def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = arguments.device_of(args)
    log = Log(args.output, device)
    model = random_model(
        args.model,
        device,
        arguments.dtype_of(args),
        layers=args.layers,
        seed=args.seed,
        query_spread=args.query_spread,
        devices=args.devices,
    )
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    log.write({"kind": "model", "model": args.model, "dtype": args.dtype, "weights_gib": gib(weights)})
    with tempfile.TemporaryDirectory() as folder:
        head_path = Path(args.head_path) if args.head_path else Path(folder) / "random_head_scores.json"
        if args.head_path is None:
            write_head_scores(head_path, len(model.model.layers), get_shape(args.model).heads, args.seed)
        for prompt in args.prompts:
            ids = random_ids(model, prompt, args.seed)
            for case in cases(args.methods, args.budgets, args.granularity, prompt):
                _ours(args, log, model, ids, case, head_path)
            _peers(args, log, model, ids)
    print(report(log.records))
    return 1 if log.failed else 0


def _facts(system: str, case: Case, prompt: int, **more: Any) -> dict[str, Any]:
    return {"kind": "case", "system": system} | case._asdict() | {"prompt": prompt} | more


def _ours(
    args: argparse.Namespace, log: Log, model: PreTrainedModel, ids: torch.Tensor, case: Case, head_path: Path
) -> None:
    """One record per way of decoding and number of rows; the prompt pass is measured with the first."""
    prompt = len(ids)
    try:
        plan = plan_of(case, head_path, args.attn_implementation)
    except ValueError as error:
        log.failed += 1
        log.write(_facts("kvfactory", case, prompt, error=str(error)))
        return
    for rows, only in args.rows:
        if only not in (None, prompt):
            continue
        for i, path in enumerate(args.decode):

            def measure(rows: int = rows, path: str = path, with_prefill: bool = i == 0) -> dict[str, Any]:
                with attached(model, plan, args.attn_implementation):
                    facts, first = {}, None
                    if rows == 1 and with_prefill:
                        facts, first = measure_prefill(
                            model, ids, plan, args.new_tokens, args.repeats, args.case_seconds
                        )
                    try:
                        facts |= measure_decode(model, ids, plan, args.new_tokens, rows, path, first)
                    except (ValueError, torch.OutOfMemoryError) as error:  # the prompt pass was measured all the same
                        if not facts:
                            raise
                        log.failed += 1
                        facts["decode_error"] = f"{type(error).__name__}: {error}"[:300]
                    return facts

            log.case(_facts("kvfactory", case, prompt, rows=rows, decode=path), measure)


def _peers(args: argparse.Namespace, log: Log, model: PreTrainedModel, ids: torch.Tensor) -> None:
    how = (args.new_tokens, args.repeats, args.case_seconds)
    if "transformers" in args.peers:
        facts = _facts("transformers", Case("FullKV", None, None), len(ids), rows=1)
        log.case(facts, lambda: measure_transformers(model, ids, *how))
    if "kvpress" in args.peers:
        for case in cases([m for m in args.methods if m in KVPRESS_METHODS], args.budgets, ["kv_head"], len(ids)):
            facts = _facts("kvpress", case, len(ids), rows=1)
            log.case(facts, lambda case=case: measure_kvpress(model, ids, case.method, case.budget, *how))


COLUMNS = ("system", "method", "granularity", "prompt", "budget", "rows", "decode", "prefill_s", "peak_extra_gib")
COLUMNS += ("decode_ms", "entry_s", "kept_min", "kept_max", "bytes", "bytes_full", "error")


def report(records: list[dict[str, Any]]) -> str:
    """The cases and the targets as two tables."""
    found = [r for r in records if r["kind"] == "case"]
    lines = [table(list(COLUMNS), [[r.get(c) or (r.get("decode_error") if c == "error" else None) for c in COLUMNS]
                                   for r in found])]  # fmt: skip
    lines.append(table(["target", "method", "measured", "at most", "verdict"], [list(o) for o in judge(records)]))
    return "\n\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(arguments.main(run))
