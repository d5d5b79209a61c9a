"""A model over two GPUs: the same tokens as on one, and what the 70B shape takes; see benchmarks/README.md.

python -m benchmarks.bench_two_gpus --output out/two_gpus.jsonl

Two shards on two GPUs against one call on one, over a folder of LongBench, in a job long enough that start-up does not
decide (its first line compiles the kernels), and the comparison of their files:

RUN="python run_longbench.py --method snapkv,pyramidkv,adakv,h2o,streamingllm --model_path smollm2 \
    --data_dir data/LongBench --max_num_examples 100 --max_capacity_prompts 128,256,512 --kv_cache_granularity kv_head"
$RUN --datasets trec --save_dir out/compiled
time CUDA_VISIBLE_DEVICES=0 $RUN --save_dir out/one
time $RUN --launcher local --num_shards 2 --save_dir out/two
python -m benchmarks.bench_two_gpus --compare out/one,out/two
$RUN --device_map balanced --max_num_examples 4 --datasets qasper --save_dir out/balanced
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import arguments
from benchmarks.bench_correctness import first_difference
from benchmarks.bench_methods import Case, cases, plan_of
from benchmarks.measure import attached, measure_decode, prefill_rows, stored
from benchmarks.models import SHAPES, random_ids, random_model, write_head_scores
from benchmarks.timing import Log, free_memory, gib, synchronize, table
from kvfactory.cache.kv_cache import KVCache
from kvfactory.decoder import Decoder
from kvfactory.generation import generate
from kvfactory.graph_support import graph_obstacle
from kvfactory.methods import METHODS
from kvfactory.monkeypatch import get_attachment
from kvfactory.plan import Plan
from kvfactory.settings import number, whole_number

PARTS = ("equal", "graph", "large", "half")
TIMINGS = ("prefill_s", "decode_s", "rows_in_flight", "peak_mem_bytes")
LENGTHS = (61, 130, 257)
BUDGET = 48
WARM_UP = 256  # tokens by which the warm-up's prompt exceeds the budget, so that something is dropped


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError, between two Python operations, for what takes longer."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    former = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    return sorted({parameter.device for parameter in model.parameters()}, key=str)


def by_device(model: PreTrainedModel, measure: Any) -> dict[str, int]:
    """`measure(device)` of every CUDA device of the model."""
    return {str(device): measure(device) for device in devices_of(model) if device.type == "cuda"}


def declared_bytes(cache: KVCache) -> tuple[int, int]:
    """The least and the most that the method says it keeps of this prompt; equal but for some ragged methods."""
    context = cache.context(None)
    bounds = []
    for layer in cache.kv_layers:
        slot_bytes = 2 * layer.cluster.shape.head_dim * layer.store.itemsize
        bounds.append([slots * slot_bytes for slots in layer.cluster.declared_bounds(context)])
    least, most = (sum(column) for column in zip(*bounds, strict=True))
    return least, most


def measure_large(model: PreTrainedModel, plan: Plan, ids: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    """One timed prompt pass after a shorter one, then decoding; bytes and peaks per device."""
    decoder = Decoder(model)
    budget = plan.budget.tokens if plan.uses_budget else len(ids) // 4
    prefill_rows(decoder, ids[: min(len(ids), budget + WARM_UP)], [plan], 2)
    free_memory()
    before = by_device(model, torch.cuda.memory_allocated)
    for device in devices_of(model):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    [row] = prefill_rows(decoder, ids, [plan], new_tokens)
    synchronize(devices_of(model)[0])
    peaks = by_device(model, torch.cuda.max_memory_allocated)
    cache = row.output.cache
    held: dict[str, int] = {}
    for layer in cache.kv_layers:
        where = str(layer.store.buffers[0].device)
        held[where] = held.get(where, 0) + layer.store.nbytes
    least, most = declared_bytes(cache)
    facts = {"prefill_s": round(row.output.timing.prefill_s, 4)} | stored(row)
    facts |= {"bytes_by_device": held, "bytes_declared": [least, most]}
    facts |= {"passed": sum(held.values()) == facts["bytes"] and least <= facts["bytes"] <= most}
    facts |= measure_decode(model, ids, plan, new_tokens, 1, "loop", row)
    later = by_device(model, torch.cuda.max_memory_allocated)  # `measure_decode` has begun to count anew
    facts["peak_gib_by_device"] = {d: gib(max(peak, later[d])) for d, peak in peaks.items()}
    facts["peak_extra_gib_by_device"] = {d: gib(peak - before[d]) for d, peak in peaks.items()}
    return facts


def run_of(model: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int, batch: int, decode: str) -> Any:
    """Tokens, kept tokens and bytes of every prompt."""
    with attached(model, plan, "sdpa"):
        if decode == "graph" and (why := graph_obstacle(get_attachment(model), plan, model.device, model.dtype)):
            return why
        out = generate(model, prompts, count, eos_token_id=[], decode=decode, batch_size=batch, example_id="check")
        return [(row.tokens, row.cache.kept_tokens, row.cache.nbytes) for row in out.rows]


def compare_equal(
    one: PreTrainedModel, two: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int
) -> dict[str, Any]:
    """Float32: alone and in a batch everything must be equal."""
    different = [
        f"batch {batch}"
        for batch in (1, len(prompts))
        if run_of(one, plan, prompts, count, batch, "loop") != run_of(two, plan, prompts, count, batch, "loop")
    ]
    return {"passed": not different, "examples": len(prompts), "different": different}


def compare_half(
    one: PreTrainedModel, two: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int
) -> dict[str, Any]:
    """Half precision: how many examples and tokens differ, and where first."""
    pairs = zip(*(run_of(model, plan, prompts, count, 1, "loop") for model in (one, two)), strict=True)
    first = [first_difference(a[0], b[0]) for a, b in pairs]
    tokens = sum(count - step for step in first if step is not None)
    facts = {"examples": len(prompts), "tokens": count * len(prompts), "tokens_after_a_difference": tokens}
    return facts | {"differing": sum(step is not None for step in first), "first_differences": first, "passed": True}


def compare_graph(model: PreTrainedModel, plan: Plan, prompts: list[torch.Tensor], count: int) -> dict[str, Any]:
    """A model that is not on the current device: the graph must give the loop's tokens."""
    loop, graph = (run_of(model, plan, prompts, count, 1, decode) for decode in ("loop", "graph"))
    if isinstance(graph, str):
        return {"passed": True, "obstacle": graph}
    return {"passed": [row[0] for row in loop] == [row[0] for row in graph], "examples": len(prompts)}


def compare_files(a: Path, b: Path) -> dict[str, Any]:
    """Rows of two result folders, timings aside."""

    def read(folder: Path) -> dict[str, dict[str, Any]]:
        found = {}
        for path in sorted(folder.rglob("*.json")):
            if path.parent.name != "meta" and path.name != "results.json":
                for line in path.read_text(encoding="utf-8").split("\n"):
                    if line:
                        row = json.loads(line)
                        name = f"{path.relative_to(folder)}:{row['_id']}"
                        found[name] = {k: v for k, v in row.items() if k not in TIMINGS}
        return found

    one, two = read(a), read(b)
    differing = [name for name in one if one[name] != two.get(name)]
    preds = [name for name in differing if one[name].get("pred") != two.get(name, {}).get("pred")]
    facts = {"rows": len(one), "missing": len(set(one) ^ set(two)), "differing": len(differing)}
    return facts | {"other_answers": len(preds), "first": differing[:5], "passed": bool(one) and one == two}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises ValueError for a value that cannot be."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags.add_argument("--parts", default=",".join(PARTS))
    flags.add_argument("--methods", help="default every method")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: one device, to try it out")
    flags.add_argument("--large_model", default="llama3-70b", choices=SHAPES)
    flags.add_argument("--half_model", default="llama3-8b", choices=SHAPES)
    flags.add_argument("--prompt", type=whole_number, default=8192)
    flags.add_argument("--budget", type=whole_number, default=2048)
    flags.add_argument("--new_tokens", type=whole_number, default=32)
    flags.add_argument("--half_prompts", type=whole_number, default=2, help="of 1,000 tokens each, budget 256")
    flags.add_argument("--case_seconds", type=number, default=30.0, help="a case that takes longer is given up")
    flags.add_argument("--seconds", type=number, default=220.0, help="no case is begun later")
    flags.add_argument("--seed", type=whole_number, default=0)
    flags.add_argument("--output", help="file that the JSON lines are appended to")
    flags.add_argument("--compare", help="two result folders A,B: compare their rows, and stop")
    args = flags.parse_args(argv)
    args.parts = arguments.names("parts", args.parts, PARTS)
    args.methods = arguments.methods(args.methods) if args.methods else [name for name in METHODS]
    if args.compare is not None and args.compare.count(",") != 1:
        raise ValueError(f"--compare {args.compare} is not two folders separated by a comma")
    if args.device == "cuda" and args.compare is None and torch.cuda.device_count() < 2:
        raise ValueError(
            f"this needs two CUDA devices, there are {torch.cuda.device_count()}; --device cpu tries it out"
        )
    if args.new_tokens < 8:
        raise ValueError(f"--new_tokens {args.new_tokens} is fewer than 8: the middle half of the steps is timed")
    return args


class Bench:
    """The cases of one call, each guarded and within what is left of the time."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args = args
        self.folder = folder
        self.device = torch.device(args.device)
        self.log = Log(args.output, self.device)
        self._end = time.perf_counter() + args.seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def model(self, name: str, dtype: torch.dtype, devices: int = 2) -> PreTrainedModel:
        """Two devices are one on the CPU."""
        count = devices if self.device.type == "cuda" else 1
        return random_model(name, self.device, dtype, seed=self.args.seed, query_spread=4.0, devices=count)

    def twins(self, name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The same weights on one device and on two."""
        one, two = self.model(name, dtype, 1), self.model(name, dtype)
        two.load_state_dict(one.state_dict())
        return one, two

    def prompts(self, model: PreTrainedModel, lengths: Any) -> list[torch.Tensor]:
        return [random_ids(model, length, self.args.seed + i) for i, length in enumerate(lengths)]

    def each(self, part: str, name: str, model: PreTrainedModel, budget: int, prompt: int, measure: Any) -> None:
        """`measure(plan)` for every method at kv_head."""
        shape = SHAPES[name]
        path = write_head_scores(self.folder / f"{name}.json", shape.layers, shape.heads, self.args.seed)
        for case in cases(self.args.methods, [budget], ["kv_head"], prompt):
            facts = {"kind": "case", "part": part, "model": name, "prompt": prompt} | case._asdict()
            if self.left < 1:
                self.log.failed += 1
                self.log.write(facts | {"error": f"not begun: {self.args.seconds:.0f} s are over"})
                continue

            def guarded(case: Case = case) -> dict[str, Any]:
                with time_limit(min(self.args.case_seconds, self.left)):
                    return measure(plan_of(case, path, "sdpa"))

            self.log.case(facts, guarded)

    def equal(self) -> None:
        one, two = self.twins("tiny", torch.float32)
        prompts = self.prompts(one, LENGTHS)
        measure = lambda plan: compare_equal(one, two, plan, prompts, 24)  # noqa: E731
        self.each("equal", "tiny", one, BUDGET, min(LENGTHS), measure)

    def graph(self) -> None:
        model = self.model("tiny", torch.float32, 1)
        model.to(torch.device("cuda", 1) if self.device.type == "cuda" else self.device)
        prompts = self.prompts(model, LENGTHS)
        measure = lambda plan: compare_graph(model, plan, prompts, 24)  # noqa: E731
        self.each("graph", "tiny", model, BUDGET, min(LENGTHS), measure)

    def large(self) -> None:
        args, name = self.args, self.args.large_model
        start = time.perf_counter()
        model = self.model(name, torch.bfloat16)
        weights: dict[str, int] = {}
        for parameter in model.parameters():
            where = str(parameter.device)
            weights[where] = weights.get(where, 0) + parameter.numel() * parameter.element_size()
        facts = {"kind": "model", "model": name, "made_s": round(time.perf_counter() - start, 1)}
        self.log.write(facts | {"weights_gib_by_device": {where: gib(size) for where, size in weights.items()}})
        ids = random_ids(model, args.prompt, args.seed)

        def measure(plan: Plan) -> dict[str, Any]:
            with attached(model, plan, "sdpa"):
                return measure_large(model, plan, ids, args.new_tokens)

        self.each("large", name, model, args.budget, args.prompt, measure)

    def half(self) -> None:
        one, two = self.twins(self.args.half_model, torch.bfloat16)
        prompts = self.prompts(one, [1000] * self.args.half_prompts)
        measure = lambda plan: compare_half(one, two, plan, prompts, 16)  # noqa: E731
        self.each("half", self.args.half_model, one, 256, 1000, measure)


COLUMNS = ("part", "method", "passed", "prefill_s", "decode_ms", "bytes", "bytes_by_device", "peak_gib_by_device")
COLUMNS += ("differing", "tokens_after_a_difference", "different", "obstacle", "error")


def run(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.compare is not None:
        facts = compare_files(*map(Path, args.compare.split(",")))
        print(json.dumps({"kind": "files"} | facts))
        return 0 if facts["passed"] else 1
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts:
            try:
                getattr(bench, part)()
            except (RuntimeError, ValueError) as error:  # its model: the other parts are run all the same
                bench.log.failed += 1
                bench.log.write({"kind": "case", "part": part, "error": f"{type(error).__name__}: {error}"[:500]})
            free_memory()
    found = [record for record in bench.log.records if record["kind"] == "case"]
    print(table(list(COLUMNS), [[record.get(name) for name in COLUMNS] for record in found]))
    wrong = [record for record in found if not record.get("passed", False)]
    print(f"{len(found)} cases, {len(wrong)} not passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(arguments.main(run))
