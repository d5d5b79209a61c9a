"""What the methods claim (`--list_methods`), and a trial of every claimed cell on tiny models (`--verify`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvfactory.backends import get_backend
from kvfactory.capability import FAMILIES
from kvfactory.generation import generate
from kvfactory.methods import METHODS
from kvfactory.monkeypatch import attach, detach
from kvfactory.tiny_models import random_prompt, tiny_model

REQUIRED_SETTINGS: dict[str, dict[str, Any]] = {"HeadKV": {"head_path": "uniform"}}
"""Settings without which a method refuses to run; `--verify` and the contract tests add them."""

PROMPT, BUDGET, NEW_TOKENS = 61, 24, 5  # odd lengths: nothing is a multiple of a block
OTHER_PROMPTS = (37, 20)  # the second fits the budget, so that a batch mixes compressed and whole rows
EXACT_AGREEMENT = 1e-3
"""Largest difference of logits (of magnitude 10) between backends in float32: they sum in different orders."""
HALF_AGREEMENT = 0.3
"""The same in bfloat16, which has 8 bits: one rounding of a logit of magnitude 10 is 0.03."""


def list_methods() -> list[dict[str, Any]]:
    """One row per method: name, stage, budget, granularities, backends, randomised, reference."""
    rows = []
    for name in METHODS:
        capability = METHODS.get(name).capability
        rows.append(
            {
                "method": name,
                "stage": capability.stage,
                "budget": capability.budget_means,
                "granularities": list(capability.granularities),
                "backends": list(capability.backends),
                "randomised": capability.randomised,
                "reference": capability.reference,
            }
        )
    return sorted(rows, key=lambda row: row["method"].lower())


def table_cells() -> list[list[str]]:
    """Header and rows of the capability table as text."""
    rows = list_methods()
    header = list(rows[0])

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return ", ".join(value) if isinstance(value, list) else str(value)

    return [header] + [[text(row[column]) for column in header] for row in rows]


def capability_table() -> str:
    """The table that --list_methods prints: aligned columns, one line per method."""
    cells = table_cells()
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


@dataclass(frozen=True)
class _Trial:
    """What one generation gave: new tokens per row, logits of every forward, what is wrong with its stores.

    `kept`: positions that the first row's layers keep, None where they are not recorded (everything, ragged heads).
    `near_tie`: the first row met two logits too close for batches of different sizes to agree on.
    """

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    wrong: str | None
    near_tie: bool
    kept: list[torch.Tensor | None]

    def keeps_as(self, other: _Trial) -> bool:
        """Whether both keep the same tokens, as far as they are recorded."""
        pairs = zip(self.kept, other.kept, strict=True)
        return all(a is None or b is None or torch.equal(a, b) for a, b in pairs)


def _try(model: PreTrainedModel, method: str, backend: str, granularity: str, rows: list[torch.Tensor]) -> _Trial:
    """Generates with the method at a small budget and compares the stores with what the method declares."""
    logits: list[torch.Tensor] = []
    attachment = attach(
        model,
        method,
        max_capacity_prompt=BUDGET,
        kv_cache_granularity=granularity,
        attn_implementation=backend,
        **REQUIRED_SETTINGS.get(method, {}),
    )
    attachment.record_positions = True
    hook = model.get_output_embeddings().register_forward_hook(lambda module, args, out: logits.append(out[:, -1]))
    try:
        # The loop, since a replayed step calls no hook.
        out = generate(model, rows, NEW_TOKENS, eos_token_id=[], example_id="verify", decode="loop")
        wrong = None
        for row in out.rows:
            ctx = row.cache.context(None)
            for number, layer in enumerate(row.cache.kv_layers):
                problem = layer.cluster.mismatch(layer.store.prompt_slots, ctx)
                if problem and wrong is None:
                    wrong = f"layer {number}: {problem}"
        drops = METHODS.get(method).capability.drops_tokens
        if wrong is None and drops and not any(row.cache.compressed for row in out.rows):
            wrong = f"a prompt of {len(rows[0])} tokens was not compressed to a budget of {BUDGET}"
        if wrong is None and not all(bool(part.isfinite().all()) for part in logits):
            wrong = "logits are not finite"
        kept = [layer.store.positions if len(rows) == 1 else None for layer in out.rows[0].cache.kv_layers]
        return _Trial([row.tokens for row in out.rows], logits, wrong, out.rows[0].near_ties > 0, kept)
    finally:
        hook.remove()
        detach(model)


def _absent(backend: str) -> str | None:
    """Why `backend` cannot be tried on this machine, or None."""
    try:
        get_backend(backend)
    except ValueError as reason:
        return str(reason)
    return None


class _FamilyTrials:
    """All trials on one tiny model, the sdpa ones kept to compare the other backends with."""

    def __init__(self, family: str, half: bool):
        self.model = tiny_model(family)
        if half:
            self.model = self.model.to("cuda", torch.bfloat16)
        self.half = half
        self.rows = [random_prompt(length, seed=length) for length in (PROMPT, *OTHER_PROMPTS)]
        self._reference: dict[tuple[str, str], _Trial] = {}

    def problem(self, method: str, backend: str, granularity: str) -> str | None:
        """What is wrong with one cell, or None."""
        key = (method, granularity)
        if key not in self._reference:
            self._reference[key] = _try(self.model, method, "sdpa", granularity, self.rows[:1])
        reference = self._reference[key]
        alone = reference if backend == "sdpa" else _try(self.model, method, backend, granularity, self.rows[:1])
        if alone.wrong:
            return alone.wrong
        bound = HALF_AGREEMENT if self.half else EXACT_AGREEMENT
        # Later logits are comparable only while the same tokens were fed.
        for step, (ours, theirs) in enumerate(zip(alone.logits, reference.logits, strict=True)):
            worst = float((ours.float() - theirs.float()).abs().max())
            if worst > bound:
                return f"logits of step {step} differ from sdpa's by {worst:.3g}"
            if alone.tokens[0][: step + 1] != reference.tokens[0][: step + 1]:
                break
            # In half precision the backends' prompts differ in the last bits, which may turn a tie of scores.
            if self.half and not alone.keeps_as(reference):
                break
        batch = _try(self.model, method, backend, granularity, self.rows)
        if batch.wrong:
            return f"in a batch of {len(self.rows)}: {batch.wrong}"
        if not (self.half or batch.near_tie) and batch.tokens[0] != alone.tokens[0]:
            return f"in a batch of {len(self.rows)} the tokens are {batch.tokens[0]}, alone {alone.tokens[0]}"
        return None


def verify(
    print_fn: Callable[[str], Any] = print, methods: list[str] | None = None, families: tuple[str, ...] = FAMILIES
) -> int:
    """Tries every claimed cell, method x granularity x backend x family, alone and in a batch of three.

    A cell is right when every layer stores what the method declares, logits are finite and agree with sdpa's, and a
    batch gives the tokens that the prompt gives alone. Backends whose package or device is absent are "not run".

    Returns:
        0, or 1 when a claimed cell is wrong.
    """
    counts = {"right": 0, "wrong": 0, "not run": 0}
    absent: dict[str, list[str]] = {}
    trials: dict[tuple[str, bool], _FamilyTrials] = {}
    for method in methods or [row["method"] for row in list_methods()]:
        capability = METHODS.get(method).capability
        for granularity in capability.granularities:
            for backend in capability.backends:
                reason = _absent(backend)
                if reason is not None:
                    counts["not run"] += len(families)
                    absent.setdefault(f"{backend}: {reason}", []).append(method)
                    continue
                half = backend.startswith("flash")
                wrong = []
                for family in families:
                    if (family, half) not in trials:
                        trials[family, half] = _FamilyTrials(family, half)
                    try:
                        problem = trials[family, half].problem(method, backend, granularity)
                    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError, AssertionError) as error:
                        problem = f"{type(error).__name__}: {error}"
                    counts["wrong" if problem else "right"] += 1
                    if problem:
                        wrong.append(f"{family} ({problem})")
                verdict = f"WRONG on {'; '.join(wrong)}" if wrong else f"right on {', '.join(families)}"
                print_fn(f"{method:14} {granularity:10} {backend:18} {verdict}")
    for reason, concerned in absent.items():
        print_fn(f"not run: {reason} ({', '.join(dict.fromkeys(concerned))})")
    print_fn(", ".join(f"{count} cells {what}" for what, count in counts.items()))
    return 1 if counts["wrong"] else 0
