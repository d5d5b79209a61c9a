"""What every runner's command does: parse, check, run, print the table, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvfactory import cli, listing
from kvfactory.launcher import ShardFailed, early_shards, launch
from kvfactory.local_shard import called
from kvfactory.preparation import prepare
from kvfactory.reports.stop import STOPPED, StopSignal, interruptible
from kvfactory.run_settings import RunSettings
from kvfactory.runner import execute, merge
from kvfactory.summary import summary
from kvfactory.verify_decode import DecodeMismatch


def run(settings_class: type[RunSettings], argv: Sequence[str]) -> int:
    """One call of a runner.

    Returns:
        0 all examples done, 1 some failed (each is recorded), 2 refused before the run (one sentence says why, nothing
        is written), 75 stopped by SIGTERM or SIGINT after writing what was done.
    """
    if not called():
        return 0
    settings, given = cli.parse(argv, settings_class)
    try:
        if settings.list_methods:
            print(listing.capability_table())
            return listing.verify() if settings.verify else 0
        with early_shards(settings, argv) as early:
            with interruptible():  # samples may be generated here, which takes minutes
                job = prepare(settings, given)
            if job.settings.launcher is not None:
                code = launch(job, argv, early)
            elif settings.merge_shards:
                code = merge(job)
            else:
                with StopSignal() as stop:
                    code = execute(job, stop)
        if code != STOPPED:
            print(summary(job))
            for sentence in job.suite.finish(job):
                print(sentence)
    except ValueError as error:
        print(f"{settings.program}: {error}", file=sys.stderr)
        return 2
    except DecodeMismatch as error:
        print(f"{settings.program}: {error}", file=sys.stderr)
        return 1
    except ShardFailed as error:
        print(f"{settings.program}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return STOPPED
    except OSError as error:
        print(f"{settings.program}: {error}", file=sys.stderr)
        return 1
    return code
