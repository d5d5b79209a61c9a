"""Head importance files of HeadKV: reading, checking, and whether a file belongs to a model.

Format of the published files (FYYFU/HeadKV, Important_Head/head_score): one JSON object, key "layer-head" counted from
0 over query heads, value a list with one number per successful probe trial. A bare matrix [[...]], one row of numbers
per layer, is accepted too. A sidecar <file>.meta.json may name the model: {"model": ..., "layers": L, "heads": Hq}.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

UNIFORM = "uniform"
LARGEST_SCORE = 1e100  # sums over all heads and trials stay finite
_PUBLISHED_NAME = re.compile(r"(?P<model>.+)_retrieval(_reasoning)?_heads\.json")


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Importance of every query head of a model.

    Attributes:
        values: (L, Hq) float64, not negative, sum 1.
        model: the model the scores were probed on, when the sidecar or a published file name says so.
        source: the file.
    """

    values: np.ndarray
    source: str
    model: str | None = None


def uniform_scores(num_layers: int, num_heads: int) -> HeadScores:
    """Every head alike: HeadKV then keeps what SnapKV keeps."""
    return HeadScores(np.full((num_layers, num_heads), 1 / (num_layers * num_heads)), UNIFORM)


def sidecar_path(path: str | Path) -> Path:
    """Where the description of a head score file lies: beside it, with .meta.json appended to its name."""
    return Path(f"{path}.meta.json")


def load_head_scores(path: str | Path) -> HeadScores:
    """Reads a head score file; a file that has not changed is read once per process.

    Raises:
        ValueError: the file is missing or no JSON, misses a head, holds a number that is NaN, infinite or negative, or
            is all zero, or its sidecar describes another file. The sentence names the file.
    """
    stamps = []
    for part in (Path(path), sidecar_path(path)):
        stat = part.stat() if part.is_file() else None
        stamps.append(stat and (stat.st_mtime_ns, stat.st_size))
    if stamps[0] is None:
        raise ValueError(f"--head_path {path} is not a file")
    return _load(str(path), tuple(stamps))


@functools.lru_cache(maxsize=16)
def _load(path: str, stamps: tuple) -> HeadScores:
    def refuse(problem: str) -> ValueError:
        return ValueError(f"--head_path {path}: {problem}")

    content = _read_json(path, "head_path")
    if isinstance(content, dict):
        means = _matrix_by_index(content, refuse)
    elif isinstance(content, list):
        means = _matrix_by_rows(content, refuse)
    else:
        raise refuse('holds neither {"layer-head": [numbers]} nor a matrix [[numbers]]')
    if means.min() < 0:
        layer, head = np.unravel_index(means.argmin(), means.shape)
        raise refuse(f"the score of head {layer}-{head} is negative; scores count how often a head retrieves")
    if means.max() == 0:
        raise refuse("all scores are zero, so they rank no heads")
    values = means / math.fsum(means.flat)
    return HeadScores(values, path, _model_of(Path(path), values.shape, refuse))


def _read_json(path: str | Path, flag: str) -> Any:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError(f"--{flag} {path}: a key occurs twice")
        return found

    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--{flag} {path} is not JSON: {error}") from None


def _matrix_by_index(content: dict[str, Any], refuse: Any) -> np.ndarray:
    """{"layer-head": [trials]} in any key order -> (L, Hq) means."""
    cells, trials = {}, None
    for key, value in content.items():
        match = re.fullmatch(r"(\d+)-(\d+)", key)
        if match is None:
            raise refuse(f'key {key!r} is not "layer-head", two numbers counted from 0')
        index = (int(match[1]), int(match[2]))
        if index in cells:
            raise refuse(f"head {index[0]}-{index[1]} occurs twice")
        numbers = _numbers(value if isinstance(value, list) else [value], f"head {key}", refuse)
        if trials is not None and len(numbers) != trials:
            raise refuse(f"head {key} has {len(numbers)} trials and others have {trials}")
        trials = len(numbers)
        cells[index] = float(np.mean(numbers))
    if not cells:
        raise refuse("holds no heads")
    layers, heads = (max(index[axis] for index in cells) + 1 for axis in (0, 1))
    for layer in range(layers):
        for head in range(heads):
            if (layer, head) not in cells:
                raise refuse(f"head {layer}-{head} is missing from what is otherwise {layers} layers x {heads} heads")
    return np.array([[cells[layer, head] for head in range(heads)] for layer in range(layers)])


def _matrix_by_rows(content: list[Any], refuse: Any) -> np.ndarray:
    """[[score per head] per layer] -> (L, Hq)."""
    rows = []
    for layer, row in enumerate(content):
        if not isinstance(row, list):
            raise refuse(f"row {layer} of the matrix is not a list")
        rows.append(_numbers(row, f"row {layer}", refuse))
        if len(row) != len(rows[0]):
            raise refuse(f"row {layer} has {len(row)} heads and row 0 has {len(rows[0])}")
    if not rows:
        raise refuse("holds no heads")
    return np.array(rows)


def _numbers(values: list[Any], where: str, refuse: Any) -> list[float]:
    if not values:
        raise refuse(f"{where} is empty")
    for value in values:
        if isinstance(value, (int, float)) and LARGEST_SCORE < abs(value) < math.inf:
            raise refuse(f"{where} holds a number beyond {LARGEST_SCORE:g}, so large that sums would overflow")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise refuse(f"{where} holds {value!r}, which is not a finite number")
    return [float(value) for value in values]


def _model_of(path: Path, shape: tuple[int, int], refuse: Any) -> str | None:
    sidecar = sidecar_path(path)
    if not sidecar.is_file():
        published = _PUBLISHED_NAME.fullmatch(path.name)
        return published and published["model"]
    described = _read_json(sidecar, "head_path")
    if not isinstance(described, dict) or not isinstance(described.get("model"), str):
        raise refuse(f'its sidecar {sidecar.name} does not name a model: expected {{"model": ...}}')
    for name, size in zip(("layers", "heads"), shape, strict=True):
        if described.get(name, size) != size:
            raise refuse(f"its sidecar {sidecar.name} says {described[name]} {name}, the file has {size}")
    return described["model"]


def check_scores_fit(
    scores: HeadScores, num_layers: int, num_heads: int, model: str | None = None, force: bool = False
) -> None:
    """Refuses scores of another shape, or of another model of the same shape.

    Args:
        num_layers, num_heads: of the model, query heads.
        model: its name or path, None where it is not known; only the last part of the path is compared, in any case.
        force: accept another model's scores (--head_path_force on).

    Raises:
        ValueError: one sentence naming the file, what it holds and what the model has.
    """
    layers, heads = scores.values.shape
    if (layers, heads) != (num_layers, num_heads):
        raise ValueError(
            f"--head_path {scores.source} scores {layers} layers x {heads} heads, the model has {num_layers} layers x "
            f"{num_heads} query heads: give the file of this model, make one with `python -m kvfactory.probe_heads`, "
            f"or use --head_path {UNIFORM}"
        )
    if model is None or scores.model is None or force or _short(model) == _short(scores.model):
        return
    raise ValueError(
        f"--head_path {scores.source} was probed on {scores.model}, not on {model}: give the file of this model, make "
        f"one with `python -m kvfactory.probe_heads`, use --head_path {UNIFORM}, or accept it with --head_path_force on"
    )


def _short(model: str) -> str:
    return Path(model).name.lower()
