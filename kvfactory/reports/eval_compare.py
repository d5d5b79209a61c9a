"""Two result files, or two folders of them, compared example by example."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfactory.data.tasks import canonical_dataset
from kvfactory.reports.eval_cells import score_file
from kvfactory.reports.eval_files import canonical_label, dataset_order, find_runs
from kvfactory.reports.tables import format_number, format_table

DRAWS = 1000
SEED = 0
_TIE = 1e-9  # scores closer than this are equal: rescoring repeats itself to far less


@dataclass(frozen=True)
class Difference:
    """B against A on the examples of one dataset that both have. Scores and differences in percent.

    Attributes:
        name_a, name_b: file labels.
        low, high: ends of the 95 % interval of `difference`, B minus A.
        wins, ties, losses: examples where B scores higher, equal, lower.
        alone: examples that only one side has; they are left out.
    """

    dataset: str
    name_a: str
    name_b: str
    n: int
    score_a: float | None
    score_b: float | None
    low: float | None
    high: float | None
    wins: int
    ties: int
    losses: int
    alone: int

    @property
    def difference(self) -> float | None:
        return None if self.score_a is None else self.score_b - self.score_a


def bootstrap_interval(values: np.ndarray, draws: int = DRAWS, seed: int = SEED) -> tuple[float, float]:
    """2.5 and 97.5 percentiles of the mean of `values` (n,) under `draws` resamplings of its n entries."""
    rng = np.random.default_rng(seed)
    means = np.array([values[rng.integers(0, len(values), len(values))].mean() for _ in range(draws)])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def compare_scores(
    dataset: str, a: tuple[str, dict[str, float]], b: tuple[str, dict[str, float]], draws: int = DRAWS, seed: int = SEED
) -> Difference:
    """Paired comparison of two sides, each (label, {_id: score in [0, 1]})."""
    (name_a, scores_a), (name_b, scores_b) = a, b
    ids = [i for i in scores_a if i in scores_b]
    alone = len(scores_a) + len(scores_b) - 2 * len(ids)
    if not ids:
        return Difference(dataset, name_a, name_b, 0, None, None, None, None, 0, 0, 0, alone)
    left, right = np.array([scores_a[i] for i in ids]), np.array([scores_b[i] for i in ids])
    change = right - left
    low, high = bootstrap_interval(100 * change, draws, seed)
    wins, losses = int((change > _TIE).sum()), int((change < -_TIE).sum())
    means = 100 * float(left.mean()), 100 * float(right.mean())
    return Difference(
        dataset, name_a, name_b, len(ids), *means, low, high, wins, len(ids) - wins - losses, losses, alone
    )


def compare_paths(a: str | Path, b: str | Path, draws: int = DRAWS, seed: int = SEED) -> list[Difference]:
    """Compare two result files, or two run folders.

    Folders are paired by dataset and file label (method and suffix); when each holds a single label, those two are
    paired whatever they are called. A file against a file is one pair.

    Raises:
        ValueError: a path is missing or broken, one is a file and the other a folder, two files are of different
            datasets, or two folders have nothing in common.
    """
    paths = Path(a), Path(b)
    for path in paths:
        if not path.exists():
            raise ValueError(f"compare: {path} does not exist.")
    if paths[0].is_file() != paths[1].is_file():
        raise ValueError(f"compare: {a} and {b} must both be result files or both be run folders.")
    if paths[0].is_file():
        return [_compare_files(*paths, draws, seed)]
    files_a, files_b = (_one_run(path) for path in paths)
    if len(files_a) == len(files_b) == 1:
        pairs = [(next(iter(files_a)), next(iter(files_b)))]
    else:
        pairs = [(label, label) for label in files_a if label in files_b]
    found = [
        _compare_files(files_a[x][dataset], files_b[y][dataset], draws, seed)
        for x, y in pairs
        for dataset in sorted(files_a[x].keys() & files_b[y].keys(), key=dataset_order)
    ]
    if not found:
        raise ValueError(
            f"compare: {a} ({', '.join(files_a)}) and {b} ({', '.join(files_b)}) have no method and dataset in common; "
            "give two result files to compare different methods."
        )
    return found


def _one_run(path: Path) -> dict[str, dict[str, Path]]:
    runs = find_runs(path)
    if len(runs) > 1:
        raise ValueError(f"compare: {path} holds {len(runs)} run folders, give one: {', '.join(r.name for r in runs)}.")
    return runs[0].files


def _compare_files(a: Path, b: Path, draws: int, seed: int) -> Difference:
    datasets = [canonical_dataset(path.resolve().parent.name) for path in (a, b)]
    if datasets[0] != datasets[1]:
        raise ValueError(f"compare: {a} is of {datasets[0]} and {b} of {datasets[1]}, so they cannot be paired.")
    sides = []
    for path in (a, b):
        cell = score_file(path, datasets[0])
        sides.append((canonical_label(path.name.removesuffix(".json")), {e.id: e.score for e in cell.examples}))
    return compare_scores(datasets[0], *sides, draws, seed)


def format_comparison(differences: list[Difference], name_a: str, name_b: str) -> str:
    """The table of `compare_paths` with the sentence that explains it."""
    rows = []
    for d in differences:
        method = d.name_a if d.name_a == d.name_b else f"{d.name_a} -> {d.name_b}"
        interval = f"[{d.low:+.2f}, {d.high:+.2f}]" if d.n else ""
        change = "" if d.difference is None else f"{d.difference:+.2f}"
        rows.append([d.dataset, method, d.n, format_number(d.score_a), format_number(d.score_b), change, interval])
        rows[-1] += [f"{d.wins}/{d.ties}/{d.losses}", d.alone]
    headers = ["dataset", "method", "n", "A", "B", "B - A", "95 % interval", "win/tie/loss of B", "in one only"]
    how = f"Paired by _id; the interval is a bootstrap over examples, {DRAWS} draws, seed {SEED}."
    return f"A = {name_a}\nB = {name_b}\n{how}\n\n{format_table(headers, rows, 'llrrrrrrr')}"
