"""The log of trials beside a head score file, and the score file itself.

`{output}.trials.jsonl`: a first line that says what is probed, then one line per finished trial, appended whole. A
probe that was killed goes on from it; a torn last line is dropped.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfactory.ops.head_scores import sidecar_path
from kvfactory.reports.files import json_bytes, write_atomically


@dataclass(frozen=True)
class TrialResult:
    """One line of the log.

    Attributes:
        trial: the trial's name.
        passed: whether its scores count.
        quality: what the gate looked at, in [0, 1]; None without a gate.
        output: the text that came out.
        scores: L x Hq numbers.
    """

    trial: str
    passed: bool
    quality: float | None
    output: str
    scores: list[list[float]]


class TrialLog:
    """Results of finished trials; the caller owns the output file."""

    def __init__(self, output: Path, identity: dict[str, Any], fresh: bool = False):
        """Opens the log of `output`, or begins one.

        Args:
            identity: everything that scores depend on, JSON values.
            fresh: drop what is there.

        Raises:
            ValueError: the log belongs to another probe, or is broken.
        """
        self.path = Path(f"{output}.trials.jsonl")
        self.results: dict[str, TrialResult] = {}
        if fresh:
            self.path.unlink(missing_ok=True)
        if self.path.is_file():
            self._read(identity)
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json_bytes({"probe": identity}) + b"\n")

    def _read(self, identity: dict[str, Any]) -> None:
        whole, newline, torn = self.path.read_bytes().rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        if not lines:
            self.path.unlink()
            return
        try:
            found = json.loads(lines[0])["probe"]
            results = [TrialResult(**json.loads(line)) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--output: {self.path} is no log of trials ({error}); use --overwrite") from error
        if found != identity:
            changed = sorted(k for k in {*found, *identity} if found.get(k) != identity.get(k))
            raise ValueError(
                f"--output: {self.path} holds trials of another probe ({changed[0]}: {found.get(changed[0])} there, "
                f"{identity.get(changed[0])} now); give another --output, or --overwrite to start anew"
            )
        if torn:
            os.truncate(self.path, len(whole) + 1)
        self.results = {result.trial: result for result in results}

    def add(self, result: TrialResult) -> None:
        """Appends one line and makes sure that it is on disk."""
        with open(self.path, "ab") as file:
            file.write(json_bytes(vars(result)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.results[result.trial] = result


def write_scores(output: Path, scores: list[list[list[float]]], about: dict[str, Any]) -> None:
    """Writes the published format, {"layer-head": [one number per trial]} on one line, and its sidecar before it.

    Args:
        scores: trials x L x Hq.
        about: the sidecar's content.
    """
    stacked = torch.tensor(scores, dtype=torch.float64)
    _, layers, heads = stacked.shape
    table = {f"{i}-{j}": stacked[:, i, j].tolist() for i in range(layers) for j in range(heads)}
    write_atomically(sidecar_path(output), json_bytes(about, indent=1) + b"\n")
    write_atomically(output, json_bytes(table) + b"\n")
