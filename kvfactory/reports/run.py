"""All files of one run (one method, one budget, one set of settings, several datasets), in the order that is safe.

with Run(paths, orders, overwrite) as run:      # locks and reads; refuses; writes nothing
    run.check(settings, datasets)               # refuses; writes nothing
    ...                                         # load the model
    run.start(settings, environment, datasets)  # old results go (with overwrite), then the record is written
    for name, results in run.results.items():
        for example in ...:                     # those not in results.done
            results.append(row)
        results.close()
    run.exit_code = ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvfactory.reports.records import ResultFile
from kvfactory.reports.run_paths import RunPaths
from kvfactory.reports.run_record import RunRecord


class Run:
    """Owns the result files of all datasets of a run, and its record.

    Args:
        paths: where the files are; with a shard set, `orders` holds that shard's share.
        orders: per dataset the `_id`s in data order.
        overwrite: start anew; old results are removed by `start`, all of them before the first new row, so that a
            kill in between leaves none that look like the new run's.
        force: --resume force, see `RunRecord.check`.

    Attributes:
        results: one `ResultFile` per dataset, in the order given.
        record: the `RunRecord`.
        exit_code: set by the caller before leaving; None in the record means that the run ended in an exception.

    Raises:
        FileInUse, ValueError: as `ResultFile`; what was locked before is given up again.
    """

    def __init__(
        self, paths: RunPaths, orders: Mapping[str, Sequence[str]], overwrite: bool = False, force: bool = False
    ):
        self.paths = paths
        self.overwrite = overwrite
        self.force = force
        self.record = RunRecord(paths)
        self.results: dict[str, ResultFile] = {}
        self.exit_code: int | None = None
        try:
            for name, order in orders.items():
                self.results[name] = ResultFile(paths.results(name), order, overwrite)
        except BaseException:
            self.close()
            raise

    @property
    def notices(self) -> list[str]:
        """What was put right in the files at opening, for the user."""
        return [notice for results in self.results.values() for notice in results.notices]

    @property
    def complete(self) -> bool:
        """Whether every example of every dataset has a result."""
        return all(results.complete for results in self.results.values())

    @property
    def failed(self) -> int:
        """Number of examples whose only rows are failures."""
        return sum(len(results.failed) for results in self.results.values())

    def check(self, settings: Mapping[str, Any], datasets: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """`RunRecord.check`: refuse settings or data other than those on record, or with `force` name them."""
        return self.record.check(settings, datasets, self.overwrite, self.force)

    def start(
        self, settings: Mapping[str, Any], environment: Mapping[str, Any], datasets: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Check, discard what is to be overwritten, and write the record; to be called before the first row."""
        self.check(settings, datasets)
        for results in self.results.values():
            results.discard()
        done = {name: [i for i in results.order if i in results.done] for name, results in self.results.items()}
        self.record.start(settings, environment, datasets, done, self.overwrite, self.force)

    def close(self) -> None:
        """Close all result files (putting them into data order) and the record."""
        with ExitStack() as stack:  # each is closed whatever the others raise, the record last
            stack.callback(lambda: self.record.close(self.exit_code))
            for results in self.results.values():
                stack.callback(results.close)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
