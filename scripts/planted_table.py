"""Write docs/planted_retrieval.md: `python scripts/planted_table.py [--prompts 20] [--check]`.

Recall of the planted-retrieval model (`scripts/make_planted_model.py`) for every method that fits it, at several
budgets and depths. The result is the same on every run: weights are committed and prompts are seeded. `--check` writes
nothing and ends with 1 when the page differs from what would be written.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from planted import PLANTED_HEAD, planted_model, probe_scores, prompts, recalls  # noqa: E402

from kvfactory.loading import quiet_transformers  # noqa: E402
from kvfactory.plan import Plan, make_plan  # noqa: E402
from kvfactory.settings import whole_number  # noqa: E402

PAGE = ROOT / "docs" / "planted_retrieval.md"
BUDGETS = (16, 32, 64, 128)
DEPTHS = (0, 25, 50, 75, 100)
GRANULARITIES = ("kv_head", "query_head")
PROMPTS = 20
METHODS = (
    *("FullKV", "Oracle", "Random", "StreamingLLM", "H2O", "SnapKV", "PyramidKV"),
    *("AdaKV", "HeadKV", "CAM", "NACL", "Scissorhands"),
)

INTRODUCTION = """# Planted retrieval

Written by `python scripts/planted_table.py`; do not edit.

A Llama of two layers whose weights are set by hand (`scripts/make_planted_model.py`) recalls key-value pairs through
one known head, layer {layer} head {head}. Prompts are filler with 16 records `key a b` and end with `? key`; the
answer is `a b`. The token `a` comes out of the prompt pass, which no method touches; `b` has to be read from what the
method kept. A cell is the percentage of {count} seeded prompts (200 to 500 tokens) whose answer is right, with the
asked record at one depth. All methods have their factory preset.

What the model shows is mechanism, not quality: whether a method keeps the one token that its query will need.

- FullKV and Oracle are the ceiling, Random is the floor of anything that selects; all keep the most recent tokens.
- StreamingLLM holds the ends and loses the middle.
- SnapKV sees the last prompt token attend to `a`; `b` survives because scores are pooled over neighbours. At a budget
  of 16 the window takes half, and the rest goes to the neighbourhoods of the first token and of the tokens before `a`.
- H2O, CAM, NACL and Scissorhands do not pool: the planted head attends to `a` and nothing in the prompt attends to
  `b`, so `b` stays only where some other score, a draw or its place speaks for it.
- PyramidKV gives the deepest layer a twentieth of the budget, and with two layers that is where the planted head is.
- HeadKV's scores come from the probe on this very model; its factory preset keeps the window on top of the budget.
- L2Norm is absent: it leaves the first two layers alone, and this model has no others.
"""


def plans(granularity: str, head_path: str) -> dict[tuple[str, int], Plan]:
    """One plan per row of a table; FullKV has no budget and stands once."""
    found = {}
    for method in METHODS:
        for budget in BUDGETS[:1] if method == "FullKV" else BUDGETS:
            options = {"head_path": head_path} if method == "HeadKV" else {}
            found[method, budget] = make_plan(
                method, max_capacity_prompt=budget, kv_cache_granularity=granularity, **options
            )
    return found


def page(count: int = PROMPTS) -> str:
    """The text of the page."""
    layer, head = PLANTED_HEAD
    lines = [INTRODUCTION.format(layer=layer, head=head, count=count)]
    model = planted_model()
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "planted.json"
        scores.write_text(json.dumps(probe_scores(model)), encoding="utf-8")
        for granularity in GRANULARITIES:
            rows = plans(granularity, str(scores))
            columns = [recalls(model, list(rows.values()), prompts(count, depth)) for depth in DEPTHS]
            lines.append(f"## {granularity}\n")
            lines.append("| method | budget | " + " | ".join(f"depth {depth} %" for depth in DEPTHS) + " |")
            lines.append("|---|---|" + "---|" * len(DEPTHS))
            for (method, budget), recalled in zip(rows, zip(*columns, strict=True), strict=True):
                shown = "all" if method == "FullKV" else str(budget)
                lines.append(f"| {method} | {shown} | " + " | ".join(f"{100 * r:.0f}" for r in recalled) + " |")
            lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description="Write the planted-retrieval table.")
    parser.add_argument("--out", type=Path, default=PAGE, help="file to write")
    parser.add_argument("--prompts", type=whole_number, default=PROMPTS, help="prompts per cell")
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if the page is stale")
    options = parser.parse_args(arguments)
    quiet_transformers()
    text = page(options.prompts)
    if options.check:
        stale = not options.out.is_file() or options.out.read_text(encoding="utf-8") != text
        if stale:
            print(f"{options.out} is stale; run scripts/planted_table.py", file=sys.stderr)
        return int(stale)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
