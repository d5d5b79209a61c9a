"""All shards of one call: a process for each, one at a time per GPU, then their files joined as --merge_shards does.

A shard that fails does not end the others. Whatever is done stays, so the same command again does what is missing.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from kvfactory.device_map import is_spread
from kvfactory.loading import hardware
from kvfactory.local_shard import LocalShard, WaitingShard
from kvfactory.methods import METHODS
from kvfactory.preparation import Job, PlannedRun
from kvfactory.reports.environment import collect_environment
from kvfactory.reports.run import Run
from kvfactory.reports.shards import shard_counts
from kvfactory.reports.stop import STOPPED, StopSignal
from kvfactory.run_settings import RunSettings
from kvfactory.runner import Notices, execute, is_finished, merge

ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1


class ShardFailed(Exception):
    """Some shards have not finished; the message says which, and how to go on.

    Attributes:
        code: exit code of the whole call.
    """

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code


class Shard(Protocol):
    """A shard under way."""

    def poll(self) -> int | None:
        """Its exit code, a negative signal number when it was killed; None while it runs."""

    def stop(self) -> None:
        """Asks it to stop after its example; a second time, at once."""


class RayHost:
    """What runs where Ray has found a GPU, which is the only one its process sees."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._lines: list[str] = []
        self._shard = LocalShard(command, environ, self._lines.append)

    def poll(self) -> tuple[int | None, list[str]]:
        code = self._shard.poll()
        lines = self._lines[:]
        del self._lines[: len(lines)]
        return code, lines

    def stop(self) -> None:
        self._shard.stop()


class RayShard:
    """A shard as an actor of Ray."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], emit: Callable[[str], None], gpus: int):
        import ray

        self._ray, self._emit = ray, emit
        self._actor = ray.remote(num_gpus=gpus, num_cpus=1)(RayHost).remote(command, environ)

    def poll(self) -> int | None:
        try:
            code, lines = self._ray.get(self._actor.poll.remote())
        except self._ray.exceptions.RayActorError as error:
            self._emit(f"Ray has lost this shard: {' '.join(str(error).split())}")
            return -signal.SIGKILL
        for line in lines:
            self._emit(line)
        if code is not None:
            self._ray.kill(self._actor)
        return code

    def stop(self) -> None:
        self._actor.stop.remote()


Place = Mapping[str, str]
"""Environment variables of the shards that run there one after the other."""


def local_places(device: str, count: int | None) -> tuple[list[Place], Callable[..., Shard]]:
    """One place per visible GPU, or `count` (default 1) on the CPU, among which its threads are shared out."""
    if device == "cuda":
        visible = torch.cuda.device_count()
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else map(str, range(visible))
        return [
            {"CUDA_VISIBLE_DEVICES": name.strip()} for name, _ in zip(names, range(visible), strict=False)
        ], LocalShard
    count = count or 1
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    return [{"OMP_NUM_THREADS": threads}] * count, LocalShard


def ray_places(device: str, count: int | None) -> tuple[list[Place], Callable[..., Shard]]:
    """One place per GPU of the cluster, or `count` (default 1) where the run is on the CPU.

    Raises:
        ValueError: Ray is not installed, or its cluster has no GPU for a run on CUDA.
    """
    if find_spec("ray") is None:
        raise ValueError("--launcher ray needs the package ray (pip install ray); --launcher local works without it")
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ValueError("--launcher ray: its cluster has no GPU; give --device cpu to run there all the same")
    each = 1 if device == "cuda" else 0

    def start(command: Sequence[str], environ: Mapping[str, str], emit: Callable[[str], None]) -> Shard:
        return RayShard(command, environ, emit, each)

    return [{}] * (gpus if each else count or 1), start


PLACES = {"local": local_places, "ray": ray_places}


EarlyShards = dict[tuple[str, ...], WaitingShard]
"""Shards that wait for the word, by their commands."""


@contextmanager
def early_shards(settings: RunSettings, argv: Sequence[str]) -> Iterator[EarlyShards]:
    """The first shard of every GPU for --launcher local, started while the call is still to be prepared.

    They import, open their GPU and wait, so that this takes no time of its own after `prepare`. Those that nobody has
    taken out of the dict by the end are ended. On the CPU there are none: they would take `prepare` its threads.

    Raises:
        ValueError: settings that the arguments alone show to be wrong.
    """
    settings = settings.checked(METHODS)
    early: EarlyShards = {}
    try:
        if settings.launcher == "local" and settings.device != "cpu":
            # Counting GPUs asks the driver's library alone: CUDA itself, which takes seconds, starts here and there at
            # the same time.
            places, _ = local_places("cuda", settings.num_shards)
            count = settings.num_shards or len(places)
            for k, place in zip(range(count if count > 1 else 0), places, strict=False):
                command = shard_command(settings.program, argv, k, count)
                early[tuple(command)] = WaitingShard(command, place)
        yield early
    finally:
        for shard in early.values():
            shard.kill()
        for shard in early.values():
            shard.close()


def launch(job: Job, argv: Sequence[str], early: EarlyShards) -> int:
    """Runs all shards of a job and joins them.

    Args:
        argv: the arguments of the call, which every shard gets with its number.
        early: shards of this call that have been started; those that are run are taken out.

    Returns:
        Exit code: 0 every example has a result, 1 some failed (each is recorded), 75 stopped in between.

    Raises:
        ValueError: refused before any shard began.
        ShardFailed: one or more shards did not finish; nothing is joined.
    """
    settings = job.settings
    pending = _unfinished(job)
    if not pending:
        return 0
    places, start = PLACES[settings.launcher](job.computation.device, settings.num_shards)
    count = settings.num_shards or len(places)
    if count == 1:
        with StopSignal() as stop:
            return execute(job, stop)
    _check(job, pending, count)
    if settings.overwrite:
        _discard(job)
    commands = [shard_command(settings.program, argv, k, count) for k in range(count)]

    def begin(command: Sequence[str], environ: Mapping[str, str], emit: Callable[[str], None]) -> Shard:
        waiting = early.pop(tuple(command), None)
        if waiting is not None and waiting.go(emit):
            return waiting
        return start(command, environ, emit)

    with StopSignal() as stop:
        codes = run_shards(commands, places, begin, stop)
        if stop.requested and not set(codes) <= {0, 1}:
            return STOPPED
    if unfinished := {k: code for k, code in enumerate(codes) if code not in (0, 1)}:
        raise ShardFailed(_sentence(unfinished, count), _code(list(unfinished.values())))
    try:
        merge(job, pending, count)
    except ValueError as error:  # a shard that went on to the end without all its results
        raise ShardFailed(f"{error}; or give the same command again", max(codes) or 2) from error
    return max(codes)


def _unfinished(job: Job) -> list[PlannedRun]:
    """The runs whose joined files are not there; refuses those that an undivided call has begun."""
    tell, pending = Notices(), []
    for planned in job.runs:
        if is_finished(job, planned, tell):
            continue
        pending.append(planned)
        if job.settings.overwrite:
            continue
        with Run(planned.paths, job.orders) as run:
            for results in run.results.values():
                if rows := len(results.done) + len(results.failed):
                    raise ValueError(
                        f"{results.path} holds {rows} of {len(results.order)} results already, {len(results.failed)} "
                        "of them failed: go on without --launcher, or start anew with --overwrite"
                    )
            run.exit_code = 0
    return pending


def _check(job: Job, pending: Sequence[PlannedRun], count: int) -> None:
    most = max(len(order) for order in job.orders.values())
    if count > most:
        raise ValueError(f"--num_shards {count} is more than the {most} examples of the largest dataset")
    if is_spread(job.computation.device_map):
        raise ValueError(
            f"--launcher {job.settings.launcher} gives each shard one GPU, and this model needs several: leave it out"
        )
    for planned in pending:
        if others := shard_counts(planned.paths, job.orders) - {count}:
            raise ValueError(
                f"{planned.paths.folder} holds shards of {planned.paths.label} from a call with --num_shards "
                f"{min(others)}: give that number to go on, or remove them"
            )


def _discard(job: Job) -> None:
    """--overwrite of joined results; each shard does the same with its own."""
    environment = collect_environment(hardware(job.computation.device))
    for planned in job.runs:
        with Run(planned.paths, job.orders, overwrite=True) as run:
            run.start(planned.settings, environment, planned.facts)
            run.exit_code = 0


def shard_command(program: str, argv: Sequence[str], shard: int, count: int) -> list[str]:
    """The call of one shard: `argv` without what concerns the launcher."""
    kept, rest = [], deque(argv)
    while rest:
        word = rest.popleft()
        name, equals, _ = word.partition("=")
        if name in ("--launcher", "--num_shards"):
            if not equals:
                rest.popleft()
            continue
        kept.append(word)
    number = ["--num_shards", str(count), "--shard_id", str(shard)]
    return [sys.executable, str(ROOT / program), *kept, *number]


def run_shards(
    commands: Sequence[Sequence[str]], places: Sequence[Place], start: Callable[..., Shard], stop: StopSignal
) -> list[int | None]:
    """Runs commands, at most one at a place at a time -> their exit codes; None for one that was not begun."""
    count = len(commands)
    waiting, free = deque(range(count)), deque(places)
    running: dict[int, tuple[Shard, Place]] = {}
    codes: list[int | None] = [None] * count
    asked = False

    def look() -> None:
        for k, (shard, place) in list(running.items()):
            codes[k] = shard.poll()
            if codes[k] is not None:
                free.append(place)
                del running[k]

    try:
        while running or (waiting and not stop.requested):
            while waiting and free and not stop.requested:
                k, place = waiting.popleft(), free.popleft()
                running[k] = start(commands[k], place, _printer(f"[shard {k} of {count}]")), place
            if stop.requested and not asked:
                asked = True
                for shard, _ in running.values():
                    shard.stop()
            look()
            time.sleep(POLL_SECONDS)
    except BaseException as error:  # a second signal, or no shard can be started: none is left behind
        for shard, _ in running.values():
            shard.stop()
        while running:
            look()
            time.sleep(POLL_SECONDS)
        if not isinstance(error, KeyboardInterrupt):
            raise
    return codes


def _printer(prefix: str) -> Callable[[str], None]:
    def emit(line: str) -> None:
        print(f"{prefix} {line}", file=sys.stderr, flush=True)

    return emit


def _sentence(unfinished: Mapping[int, Any], count: int) -> str:
    parts = [f"shard {k} of {count} {_ending(code)}" for k, code in unfinished.items()]
    rest = "the others are finished" if len(parts) < count else "what they have done is kept"
    return f"{', '.join(parts)}; {rest}: give the same command again to do what is missing and to join the shards"


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return {STOPPED: "was stopped", 2: "was refused (see above)"}.get(code, f"ended with exit code {code}")


def _code(codes: Sequence[int]) -> int:
    return codes[0] if len(set(codes)) == 1 and codes[0] in (2, STOPPED) else 1
