"""The largest sample that fits a number of tokens, with few tokenisations.

Counting is what costs: a prompt of 131,072 tokens takes a tokenizer a good part of a second. Counts are nearly linear
in the units of a haystack, so a secant finds the place and a bracket of two neighbours proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfactory.ruler.sample import Sample, TaskMaker

Count = Callable[[str, str], int]  # (input, answer prefix) -> tokens of the prompt as the model gets it
_SECANT_STEPS = 8  # then the bracket is halved instead
_MAX_COUNTS = 64
_UNITS_PER_TOKEN = 8  # a text that needs more units than this per token does not grow


@dataclass(frozen=True)
class Fitted:
    """A sample brought to length.

    Attributes:
        tokens: of the prompt, as counted.
        tokens_per_unit: mean growth, the guess for the next sample.
    """

    sample: Sample
    units: int
    tokens: int
    tokens_per_unit: float


class TooLong(ValueError):
    """The smallest sample does not fit; `tokens` is what its prompt takes."""

    def __init__(self, tokens: int, target: int):
        super().__init__(f"the smallest sample has {tokens} prompt tokens, more than {target}")
        self.tokens = tokens


def fit(maker: TaskMaker, key: str, count: Count, target: int, guess: Fitted | None = None) -> Fitted:
    """The sample of `key` whose prompt has at most `target` tokens while one unit more has too many.

    Counts need not be monotone: what is returned was counted and fits, and its neighbour was counted and does not.

    Args:
        guess: another sample of the same task and target; with it most samples take three counts.

    Raises:
        TooLong: not even `maker.smallest` units fit.
        ValueError: the text stops growing before the target, so there is no largest sample.
    """
    smallest = maker.smallest
    most = max(smallest, _UNITS_PER_TOKEN * target)
    fits: tuple[int, int] | None = None  # (units, tokens) of the largest that fits so far
    over: tuple[int, int] | None = None  # of the smallest that does not
    best = first = None
    slope = guess.tokens_per_unit if guess else 0.0
    units = min(max(smallest, guess.units), most) if guess else smallest
    for step in range(_MAX_COUNTS):
        sample = maker.make(key, units)
        tokens = count(sample.input, sample.answer_prefix)
        first = first or (units, tokens)
        if tokens > target:
            if units == smallest:
                raise TooLong(tokens, target)
            over = (units, tokens)
        elif units == most:
            break
        else:
            fits, best = (units, tokens), sample
        if best is not None and fits is not None and over is not None and over[0] == fits[0] + 1:
            return Fitted(best, *fits, tokens_per_unit=slope)
        if abs(units - first[0]) * 8 > first[0]:  # nearer points say more about their last words than about growth
            slope = (tokens - first[1]) / (units - first[0])
        units = _next_units(smallest, most, fits, over, target, slope if step < _SECANT_STEPS else 0.0)
    raise ValueError(
        f"the text of sample {key} has {tokens} tokens with {units} units and does not grow to the {target} that it "
        "should have"
    )


def _next_units(
    smallest: int, most: int, fits: tuple[int, int] | None, over: tuple[int, int] | None, target: int, slope: float
) -> int:
    """The units to count next, strictly between `fits` and `over`; doubled or halved when there is no slope."""
    known = [point for point in (fits, over) if point is not None]
    near_units, near_tokens = min(known, key=lambda point: abs(target - point[1]))
    low = fits[0] + 1 if fits else smallest
    high = over[0] - 1 if over else min(8 * near_units, most)
    if slope > 0:
        wanted = near_units + int((target - near_tokens) // slope)
    else:
        wanted = (low + high) // 2 if over else 2 * near_units
    return min(max(wanted, low), high)
