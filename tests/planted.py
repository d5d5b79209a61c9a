"""The planted-retrieval model of `scripts/make_planted_model.py`: loading it, prompts for it, and how much it recalls.

A prompt is filler with 16 records `key a b` of symbols that occur nowhere else, and ends with `? key`; the right
continuation is `a b`. The first of the two tokens comes out of the prompt pass, which no method touches; the second
has to be read from what the method kept.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfactory.generation import Request, generate_rows
from kvfactory.monkeypatch import attach, detach
from kvfactory.plan import Plan, make_plan
from kvfactory.probe.trials import Trial
from kvfactory.probe_heads import enough_scores, probe_model

FOLDER = Path(__file__).resolve().parent / "data_planted"
SCRIPT = FOLDER.parent.parent / "scripts" / "make_planted_model.py"
RECORDS = 16
RECORD_SIZE = 3


def load_script(path: Path) -> ModuleType:
    """A script of this repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_script(SCRIPT)
PLANTED_HEAD: tuple[int, int] = maker.PLANTED_HEAD


@functools.lru_cache(maxsize=2)
def planted_model(backend: str = "sdpa") -> PreTrainedModel:
    """The committed model in float32; one object per process, so callers must detach."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation=backend).eval()


@dataclass(frozen=True)
class Prompt:
    """A question to the planted model.

    Attributes:
        ids: token ids; answer: the two right next ones; record: position of the asked record's key.
    """

    ids: tuple[int, ...]
    answer: tuple[int, int]
    record: int

    @property
    def name(self) -> str:
        """What randomised methods draw by."""
        return f"{len(self.ids)}-{self.record}-{self.answer[0]}"


def make_prompt(seed: int, length: int, depth: float) -> Prompt:
    """A prompt of `length` tokens whose asked record lies at `depth` percent of the text."""
    draw = random.Random(f"{seed}|{length}|{depth}")
    symbols = draw.sample(maker.SYMBOLS, RECORDS * RECORD_SIZE)
    records = [symbols[i : i + RECORD_SIZE] for i in range(0, len(symbols), RECORD_SIZE)]
    asked = records.pop()
    fillers = length - 3 - RECORDS * RECORD_SIZE
    units = records + [[draw.choice(maker.FILLERS)] for _ in range(fillers)]
    draw.shuffle(units)
    wanted = depth / 100 * (length - 3 - RECORD_SIZE)
    starts = [0]
    for unit in units:
        starts.append(starts[-1] + len(unit))
    place = min(range(len(starts)), key=lambda i: abs(starts[i] - wanted))
    units.insert(place, asked)
    body = [token for unit in units for token in unit]
    ids = (maker.BEGIN, *body, maker.QUERY, asked[0])
    return Prompt(ids, (asked[1], asked[2]), 1 + starts[place])


def prompts(count: int, depth: float, shortest: int = 200, longest: int = 500, first_seed: int = 0) -> list[Prompt]:
    """`count` prompts at one depth, lengths spread evenly."""
    lengths = [round(shortest + (longest - shortest) * i / max(1, count - 1)) for i in range(count)]
    return [make_prompt(first_seed + i, length, depth) for i, length in enumerate(lengths)]


def recalls(model: PreTrainedModel, plans: list[Plan], asked: list[Prompt]) -> list[float]:
    """The part of `asked` that each plan answers right; every prompt is computed once for all plans."""
    attach(model, "fullkv")
    try:
        right = {id(plan): 0 for plan in plans}
        requests = (
            Request(torch.tensor(p.ids), 2, 0, [], plans, example_id=p.name, tag=p.answer) for p in asked
        )  # fmt: skip
        for request, row, plan in generate_rows(model, requests, batch_size=len(plans)):
            if isinstance(row, Exception):
                raise row
            right[id(plan)] += tuple(row.tokens) == request.tag
    finally:
        detach(model)
    return [right[id(plan)] / len(asked) for plan in plans]


def recall(method: str, asked: list[Prompt], budget: int | None = None, **options: object) -> float:
    """The part of `asked` that the planted model answers right under one method."""
    plan = make_plan(method, max_capacity_prompt=budget, **options)
    return recalls(planted_model(), [plan], asked)[0]


def probe_trials(count: int = 12) -> list[Trial]:
    """Trials of the head probe in the planted language: the needle is the asked record, the answer its two values."""
    found = []
    for i, prompt in enumerate(prompts(count, depth=50, first_seed=900)):
        span = (prompt.record, prompt.record + RECORD_SIZE)
        found.append(Trial(str(i), prompt.ids, span, prompt.answer, " ".join(map(str, prompt.answer))))
    return found


def ends(token: int) -> bool:
    """Whether the planted model ends its output with this token."""
    return token == maker.END


def probe_scores(model: PreTrainedModel, kind: str = "retrieval", mode: str = "generate") -> dict[str, list[float]]:
    """What the probe writes for the planted model: {"layer-head": [a number per trial]}."""
    trials = probe_trials()
    quality = None if mode == "teacher_forced" else lambda output, trial: float(output.startswith(trial.reference))
    results = probe_model(model, trials, kind, mode, quality=quality, stop=ends)
    scores = torch.tensor(enough_scores(results, trials), dtype=torch.float64)
    layers, heads = scores.shape[1:]
    return {f"{i}-{j}": scores[:, i, j].tolist() for i in range(layers) for j in range(heads)}
