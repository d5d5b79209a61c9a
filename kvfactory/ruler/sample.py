"""What a task makes: one sample, and the interface through which it is brought to a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """One prompt with its references.

    Attributes:
        input: the prompt without the answer prefix; what a chat template wraps.
        answer_prefix: begins the model's answer and follows the assistant header. Starts with a blank, or is "" for a
            task without one.
        outputs: the references.
        depths: where what answers the question stands in the haystack, in percent from 0 (start) to 100 (end): for niah
            the sentence of each output, for qa the gold documents, else empty.
    """

    input: str
    answer_prefix: str
    outputs: list[str]
    depths: tuple[float, ...] = ()


class TaskMaker(Protocol):
    """Makes the samples of one task at any size.

    Attributes:
        smallest: least number of haystack units (sentences, words or documents, as the task has it) that makes a valid
            sample.
    """

    smallest: int

    def make(self, key: str, units: int) -> Sample:
        """The sample of `key` with a haystack of `units` units.

        Deterministic in both arguments. For one key more units give a longer text, and the references stay the same
        wherever the task allows it.
        """
        ...
