"""The grid of a needle run: context lengths in tokens times depths in percent.

The grid is that of run_needle_in_haystack.py of KVCache-Factory, which has it from
gkamradt/LLMTest_NeedleInAHaystack.
"""

from __future__ import annotations

import math

from kvfactory.probe.trials import spread
from kvfactory.settings import whole_number

DEPTH_KINDS = ("linear", "sigmoid")
DEPTH_INTERVALS = 10


def lengths(s_len: int, e_len: int, step: int) -> range:
    """Context lengths in tokens from `s_len` up to `e_len`, which is included where a step hits it.

    A range, since the model's window, which bounds `e_len`, is not known yet.

    Raises:
        ValueError: a value that gives no grid; names the flag.
    """
    if s_len < 1:
        raise ValueError(f"--s_len {s_len} must be at least 1 token")
    if step < 1:
        raise ValueError(f"--step {step} must be at least 1 token, since lengths grow from --s_len to --e_len")
    if e_len < s_len:
        raise ValueError(f"--e_len {e_len} must not be below --s_len {s_len}, the length that the grid starts with")
    return range(s_len, e_len + 1, step)


def depths(intervals: int = DEPTH_INTERVALS, kind: str = "linear") -> list[int]:
    """Depths in whole percent from 0 to 100, both included: 0 11 22 33 44 56 67 78 89 100 by default.

    `linear` spreads them evenly; `sigmoid` sends the even ones through 100 / (1 + exp(-0.1 (x - 50))), which puts more
    of them near the ends, and leaves 0 and 100 where they are.

    Raises:
        ValueError: an unknown kind, or fewer than 1 or so many intervals that whole percents repeat; names the flag.
    """
    if kind not in DEPTH_KINDS:
        raise ValueError(f"--depth_kind {kind!r} is unknown: give {' or '.join(DEPTH_KINDS)}")
    if intervals < 1:
        raise ValueError(f"--depth_intervals {intervals} must be at least 1, the number of depths")
    count = min(intervals, 102)  # more than 101 whole percents repeat, however many
    if kind == "linear":
        found = spread(0, 100, count)
    else:
        even = [100 * i / max(1, count - 1) for i in range(count)]
        found = [round(x if x in (0, 100) else 100 / (1 + math.exp(-0.1 * (x - 50)))) for x in even]
    if len(set(found)) < count:
        raise ValueError(
            f"--depth_intervals {intervals} with --depth_kind {kind} repeats whole percents, and each cell is run "
            "once: give fewer intervals, or the depths themselves with --depths"
        )
    return found


def parse_depths(text: str) -> list[int]:
    """ "0,50,100" -> [0, 50, 100], in the order given.

    Raises:
        ValueError: something other than distinct whole percents from 0 to 100; names --depths.
    """
    found: list[int] = []
    for piece in text.split(","):
        try:
            depth = whole_number(piece)
        except ValueError:
            raise ValueError(f"--depths {text!r}: {piece.strip()!r} is no whole number of percent") from None
        if not 0 <= depth <= 100:
            raise ValueError(f"--depths {text!r}: {depth} is outside 0 to 100, the percent of the text in front")
        if depth in found:
            raise ValueError(f"--depths {text!r}: {depth} occurs twice, and each cell is run once")
        found.append(depth)
    return found
