"""Whether every way of decoding gives the same tokens on this device; one JSON line per check, exit code 1 on failure.

float32: graph = loop = transformers' generate for every method and granularity, alone and in a batch; what AdaKV and
HeadKV keep equals the CPU's. bfloat16: graph and loop differ on no more examples than stock eager and stock sdpa do.

python -m benchmarks.bench_correctness --output correctness.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from benchmarks import arguments
from benchmarks.bench_methods import GRANULARITIES, Case, cases, plan_of
from benchmarks.measure import attached
from benchmarks.models import random_ids, random_model, write_head_scores
from benchmarks.timing import Log, table
from kvfactory.compress import compress_prompt
from kvfactory.generation import generate
from kvfactory.graph_support import graph_obstacle
from kvfactory.methods import METHODS
from kvfactory.monkeypatch import get_attachment
from kvfactory.plan import Plan
from kvfactory.rows import NEAR_TIE
from kvfactory.settings import whole_number

CHECKS = ("tokens", "kept", "half")
LENGTHS = (61, 130, 257, 200)
"""Prompts of one batch: odd lengths, one below the budget."""

BUDGET = 64


@contextmanager
def top_two_gaps(model: PreTrainedModel) -> Iterator[list[float]]:
    """Collects the gap of the two largest logits of every forward of one row, in order."""
    gaps: list[float] = []

    def note(module: Any, args: Any, logits: torch.Tensor) -> None:
        best = logits[0, -1].float().topk(2).values
        gaps.append(float(best[0] - best[1]))

    hook = model.lm_head.register_forward_hook(note)
    try:
        yield gaps
    finally:
        hook.remove()


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, None for equal lists."""
    for i, (x, y) in enumerate(itertools.zip_longest(a, b)):
        if x != y:
            return i
    return None


def tokens_of(model: PreTrainedModel, prompts: list[torch.Tensor], count: int, decode: str, batch: int) -> list[list]:
    out = generate(model, prompts, count, eos_token_id=[], decode=decode, batch_size=batch, example_id="check")
    return [row.tokens for row in out.rows]


def differences(want: list[list[int]], got: list[list[int]], gaps: list[list[float]]) -> list[dict[str, Any]]:
    """Per example that differs: which, where, and the gap of the two largest logits there in the run of `want`."""
    found = []
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        step = first_difference(a, b)
        if step is not None:
            found.append({"example": i, "step": step, "gap": round(gaps[i][step], 6)})
    return found


def reference_tokens(
    model: PreTrainedModel, prompts: list[torch.Tensor], run: Callable[[torch.Tensor], list[int]]
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and top-two gaps of one prompt after the other."""
    tokens, gaps = [], []
    for ids in prompts:
        with top_two_gaps(model) as seen:
            tokens.append(run(ids))
        gaps.append(list(seen))
    return tokens, gaps


def by_loop(model: PreTrainedModel, prompts: list[torch.Tensor], count: int) -> tuple[list, list]:
    return reference_tokens(model, prompts, lambda ids: tokens_of(model, [ids], count, "loop", 1)[0])


def check_tokens(model: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int) -> dict[str, Any]:
    """In float32: every path against the loop at batch 1. Batches may differ where two logits nearly tie."""
    with attached(model, plan, "sdpa"):
        obstacle = graph_obstacle(get_attachment(model), plan, model.device, model.dtype)
        want, gaps = by_loop(model, prompts, count)
        paths = [("hf", 1), ("loop", len(prompts))]
        paths += [("graph", 1), ("graph", len(prompts)), ("graph", 2)] if obstacle is None else []
        differing = {}
        for path, batch in paths:
            differing[f"{path} {batch}"] = differences(want, tokens_of(model, prompts, count, path, batch), gaps)
    strict = [found for name, found in differing.items() if name.endswith(" 1")]
    batched = [one for name, found in differing.items() if not name.endswith(" 1") for one in found]
    passed = not any(strict) and all(one["gap"] < NEAR_TIE for one in batched)
    return {"passed": passed, "obstacle": obstacle, "differing": {k: v for k, v in differing.items() if v}}


def check_kept(method: str, granularity: str, device: torch.device, head_path: Path, seed: int) -> dict[str, Any]:
    """What a method keeps of one layer on `device` against the CPU, float32, query scales from 1 to 30 over heads."""
    random = torch.Generator().manual_seed(seed)
    heads, kv_heads, length, D = 32, 8, 2049, 128
    q = torch.randn(1, heads, length, D, generator=random) * torch.logspace(0, 1, heads, base=30)[None, :, None, None]
    k, v = (torch.randn(1, kv_heads, length, D, generator=random) for _ in range(2))
    settings = {"head_path": str(head_path)} if method == "HeadKV" else {}
    options = dict(max_capacity_prompt=256, kv_cache_granularity=granularity, num_layers=2, **settings)
    want = compress_prompt(method, q, k, v, **options).indices[0]
    got = compress_prompt(method, *(x.to(device) for x in (q, k, v)), **options).indices[0]
    differing = [len(set(a.tolist()) ^ set(b.tolist())) for a, b in zip(want, got, strict=True)]
    sizes = [len(a) for a in want]
    return {
        "passed": not any(differing),
        "positions_differing": sum(differing),
        "heads_differing": sum(map(bool, differing)),
        "kept_min": min(sizes),
        "kept_max": max(sizes),
    }


def stock_tokens(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """Greedy tokens of a model that carries no method."""
    ids = ids.to(model.device)[None]
    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
        0, ids.shape[1] :
    ].tolist()


def stock_differences(model: PreTrainedModel, prompts: list[torch.Tensor], count: int) -> dict[str, Any]:
    """Stock eager against stock sdpa: how often another order of operations alone changes a token."""
    run = lambda ids: stock_tokens(model, ids, count)  # noqa: E731
    want, gaps = reference_tokens(model, prompts, run)
    model.set_attn_implementation("eager")
    try:
        got = [run(ids) for ids in prompts]
    finally:
        model.set_attn_implementation("sdpa")
    found = differences(want, got, gaps)
    return {"passed": True, "examples": len(prompts), "differing": len(found), "first_differences": found}


def check_half(
    model: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int, allowed: int
) -> dict[str, Any]:
    """Graph against loop at batch 1: examples that differ, at most `allowed`."""
    with attached(model, plan, "sdpa"):
        path, why = "graph", graph_obstacle(get_attachment(model), plan, model.device, model.dtype)
        if why is not None:
            path = "hf"
        want, gaps = by_loop(model, prompts, count)
        found = differences(want, tokens_of(model, prompts, count, path, 1), gaps)
    facts = {"passed": len(found) <= allowed, "path": path, "obstacle": why, "examples": len(prompts)}
    return facts | {"differing": len(found), "allowed": allowed, "first_differences": found}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a value that cannot be."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--checks", default=",".join(CHECKS))
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--methods", help="default every method")
    flags.add_argument("--new_tokens", type=whole_number, default=24)
    flags.add_argument("--float32_models", default="tiny,llama3-8b", help="shapes of the float32 checks")
    flags.add_argument("--layers", type=whole_number, default=2, help="of llama3-8b in the float32 checks")
    flags.add_argument("--half_model", default="llama3-8b", choices=("llama3-8b", "tiny"))
    flags.add_argument("--half_layers", type=whole_number, default=4)
    flags.add_argument("--half_examples", type=whole_number, default=20)
    flags.add_argument(
        "--half_prompt", type=whole_number, default=1000, help="tokens; the budget of that check is a quarter"
    )
    flags.add_argument("--kept_seeds", type=whole_number, default=3)
    flags.add_argument("--seed", type=whole_number, default=0)
    flags.add_argument("--output", help="file that the JSON lines are appended to")
    args = flags.parse_args(argv)
    args.checks = arguments.names("checks", args.checks, CHECKS)
    args.float32_models = arguments.names("float32_models", args.float32_models, ("tiny", "llama3-8b"))
    args.methods = arguments.methods(args.methods) if args.methods else [name for name in METHODS]
    if args.half_prompt < 64:
        raise ValueError(f"--half_prompt {args.half_prompt} is shorter than 64 tokens")
    return args


def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    device = arguments.device_of(args)
    log = Log(args.output, device)
    with tempfile.TemporaryDirectory() as folder:
        if "kept" in args.checks:
            head_path = write_head_scores(Path(folder) / "kept.json", 2, 32, args.seed)
            wanted = [name for name in ("AdaKV", "HeadKV") if name in args.methods]
            for method, granularity, seed in itertools.product(wanted, GRANULARITIES, range(args.kept_seeds)):
                facts = {"kind": "check", "check": "kept", "method": method, "granularity": granularity, "seed": seed}
                log.case(
                    facts,
                    lambda m=method, g=granularity, s=seed, h=head_path: check_kept(m, g, device, h, s),
                )
        if "tokens" in args.checks:
            for name in args.float32_models:
                _tokens(args, log, device, name, Path(folder))
        if "half" in args.checks:
            _half(args, log, device, Path(folder))
    checks = [r for r in log.records if r["kind"] == "check"]
    failed = [r for r in checks if not r.get("passed")]
    head = ["check", "model", "method", "granularity", "differing", "positions_differing", "error"]
    print(table(head, [[r.get(name) for name in head] for r in failed]))
    print(f"{len(checks)} checks, {len(failed)} failed")
    return 1 if failed else 0


def _model(
    args: argparse.Namespace, device: torch.device, name: str, layers: int, dtype: torch.dtype, folder: Path
) -> tuple[PreTrainedModel, Path]:
    """A model with uneven heads, and head scores for it."""
    layers = layers if name != "tiny" else None
    spread = 30.0 if name != "tiny" else 3.0  # the tiny one is peaked already
    model = random_model(name, device, dtype, layers=layers, seed=args.seed, query_spread=spread)
    config = model.config
    path = folder / f"{name}-{config.num_hidden_layers}.json"
    return model, write_head_scores(path, config.num_hidden_layers, config.num_attention_heads, args.seed)


def _tokens(args: argparse.Namespace, log: Log, device: torch.device, name: str, folder: Path) -> None:
    model, head_path = _model(args, device, name, args.layers, torch.float32, folder)
    prompts = [random_ids(model, length, args.seed + i) for i, length in enumerate(LENGTHS)]
    for case in cases(args.methods, [BUDGET], list(GRANULARITIES), max(LENGTHS)):
        facts = {"kind": "check", "check": "tokens", "model": name} | case._asdict()
        log.case(
            facts, lambda case=case: check_tokens(model, plan_of(case, head_path, "sdpa"), prompts, args.new_tokens)
        )


def _half(args: argparse.Namespace, log: Log, device: torch.device, folder: Path) -> None:
    model, head_path = _model(args, device, args.half_model, args.half_layers, torch.bfloat16, folder)
    prompts = [random_ids(model, args.half_prompt, args.seed + i) for i in range(args.half_examples)]
    facts = {"kind": "check", "check": "half", "model": args.half_model}
    stock = Case("stock eager against stock sdpa", None, None)
    if not log.case(facts | stock._asdict(), lambda: stock_differences(model, prompts, args.new_tokens)):
        return
    allowed = log.records[-1]["differing"]
    for case in cases(args.methods, [args.half_prompt // 4], list(GRANULARITIES), args.half_prompt):
        log.case(
            facts | case._asdict(),
            lambda case=case: check_half(model, plan_of(case, head_path, "sdpa"), prompts, args.new_tokens, allowed),
        )


if __name__ == "__main__":
    raise SystemExit(arguments.main(run))
