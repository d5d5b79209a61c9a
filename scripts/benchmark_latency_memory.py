"""Latency and memory of one method on a real checkpoint.

python scripts/benchmark_latency_memory.py --model_path meta-llama/Meta-Llama-3-8B-Instruct --method snapkv \
    --max_capacity_prompts 2048 --prompt_len 8192 --batch_size 16

Prompts are random token ids: what they say changes no time. Benchmarks of several methods on random weights, judged
against targets, are in benchmarks/.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvfactory.example import peaks_by_device, reset_peak  # noqa: E402
from kvfactory.generation import DECODE_PATHS, generate  # noqa: E402
from kvfactory.loading import load_model, open_checkpoint, resolve_computation  # noqa: E402
from kvfactory.monkeypatch import attach_plan, detach  # noqa: E402
from kvfactory.plan import Plan, make_plan  # noqa: E402
from kvfactory.settings import whole_number  # noqa: E402
from kvfactory.streams import outlive_readers  # noqa: E402


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a count below what can be measured."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--model_path", required=True, help="local folder, hub id, or smollm2")
    flags.add_argument("--method", default="snapkv")
    flags.add_argument("--max_capacity_prompts", type=whole_number, default=512, help="kept prompt tokens")
    flags.add_argument("--kv_cache_granularity", default="query_head", choices=("query_head", "kv_head"))
    flags.add_argument("--attn_implementation", default="auto")
    flags.add_argument("--head_path", help="HeadKV's head scores")
    flags.add_argument("--prompt_len", type=whole_number, default=8192)
    flags.add_argument("--max_new_tokens", type=whole_number, default=128)
    flags.add_argument("--batch_size", type=whole_number, default=1, help="prompts that decode together")
    flags.add_argument("--repeats", type=whole_number, default=3, help="timed runs after a warm-up; medians are shown")
    flags.add_argument("--decode", default="auto", choices=tuple(p for p in DECODE_PATHS if p != "hf"))
    flags.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    flags.add_argument("--dtype", default="auto", choices=("auto", "float16", "bfloat16", "float32"))
    flags.add_argument("--seed", type=whole_number, default=42)
    args = flags.parse_args(argv)
    for name, least in (("prompt_len", 1), ("max_new_tokens", 2), ("batch_size", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} {getattr(args, name)} is not at least {least}")
    return args


def measure(model: torch.nn.Module, prompts: list[torch.Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """One run of all prompts; a method is attached."""
    reset_peak(model)
    start = time.perf_counter()
    out = generate(model, prompts, args.max_new_tokens, eos_token_id=[], decode=args.decode)
    seconds = time.perf_counter() - start  # the last token was read on the host, so the device is done
    prefill = out.timing.prefill_s
    caches = [row.cache for row in out.rows]
    return {
        "prefill_s": prefill / len(prompts),
        "step_ms": (seconds - prefill) / (args.max_new_tokens - 1) * 1e3,
        "tokens_per_s": len(prompts) * args.max_new_tokens / seconds,
        "peak": sum(peaks_by_device(model).values()) or None,
        "stored": sum(row.prompt_bytes.used + row.prompt_bytes.aux for row in out.rows),
        "full": sum(cache.full_bytes(cache.prompt_len) for cache in caches),
    }


def report(args: argparse.Namespace, plan: Plan, runs: list[dict[str, Any]], weights: int) -> str:
    """Medians over the runs, as a table of one row per figure."""
    median = {name: statistics.median(run[name] for run in runs) for name in runs[0] if runs[0][name] is not None}
    lines = [
        ("method", f"{plan.method}, {plan.granularity}, budget {plan.budget.tag}"),
        ("prompts", f"{args.batch_size} x {args.prompt_len} tokens, {args.max_new_tokens} new tokens"),
        ("prefill, s a prompt", f"{median['prefill_s']:.4f}"),
        ("decode, ms a step", f"{median['step_ms']:.3f}"),
        ("new tokens a second, prefill included", f"{median['tokens_per_s']:.1f}"),
        ("weights, GiB", f"{weights / 2**30:.3f}"),
        ("peak beyond weights, GiB", f"{(median['peak'] - weights) / 2**30:.3f}" if "peak" in median else "-"),
        ("cache after the prompt, MiB", f"{median['stored'] / 2**20:.1f}"),
        ("of FullKV's cache", f"{median['stored'] / median['full']:.4f}"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    backend = "sdpa" if args.attn_implementation == "auto" else args.attn_implementation
    settings = {} if args.head_path is None else {"head_path": args.head_path}
    plan = make_plan(
        args.method,
        max_capacity_prompt=args.max_capacity_prompts,
        kv_cache_granularity=args.kv_cache_granularity,
        attn_implementation=backend,
        seed=args.seed,
        **settings,
    )
    checkpoint = open_checkpoint(args.model_path)
    computation = resolve_computation(checkpoint, args.device, args.dtype, args.attn_implementation, args.decode)
    window = getattr(checkpoint.config, "max_position_embeddings", None)
    if window is not None and args.prompt_len + args.max_new_tokens > window:
        raise ValueError(
            f"--prompt_len {args.prompt_len} and --max_new_tokens {args.max_new_tokens} are more than the model's "
            f"window of {window} tokens"
        )
    model = load_model(checkpoint, computation)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    random = torch.Generator().manual_seed(args.seed)
    size = (args.batch_size, args.prompt_len)
    prompts = list(torch.randint(3, model.config.vocab_size, size, generator=random))
    attach_plan(model, plan, computation.attn_implementation)
    try:
        measure(model, prompts, args)  # compiles, captures and allocates
        runs = [measure(model, prompts, args) for _ in range(args.repeats)]
    finally:
        detach(model)
    print(report(args, plan, runs, weights))
    return 0


if __name__ == "__main__":
    outlive_readers()
    try:
        sys.exit(run())
    except ValueError as error:
        sys.exit(f"error: {error}")
