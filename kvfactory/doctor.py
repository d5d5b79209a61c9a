"""`python -m kvfactory.doctor`: what is installed, whether every kernel is right on this machine, and what will run.

Every module of `kvfactory.kernels` with a function `check(device, dtype) -> list[Check]` takes part.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import sys
from collections.abc import Callable
from types import ModuleType

import torch

import kvfactory.kernels
from kvfactory.kernels.checks import Check
from kvfactory.kernels.dispatch import why_torch
from kvfactory.reports.environment import package_versions
from kvfactory.streams import outlive_readers

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PACKAGES = ("torch", "triton", "transformers", "flash-attn", "fa3-fwd", "hqq")
_ON_EVERY_DEVICE = ("kvfactory.kernels.reference",)


def describe(device: torch.device) -> list[str]:
    """Versions, GPU and the path that the kernels take, one line each."""
    versions = package_versions(_PACKAGES)
    lines = [f"python {platform.python_version()}, {platform.platform()}"]
    lines.append(", ".join(f"{name} {found or 'not installed'}" for name, found in versions.items()))
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        lines.append(
            f"{device}: {gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} "
            f"multiprocessors, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        )
    else:
        lines.append(f"{device}: kernels need CUDA, so only their torch definitions are checked")
    reason = why_torch(device)
    lines.append("runs will use the Triton kernels" if reason is None else f"runs will use torch: {reason}")
    return lines


def checked_modules(device: torch.device) -> tuple[list[ModuleType], list[str]]:
    """Kernel modules whose checks can run on a device, and a line for each one that cannot be imported."""
    modules, absent = [], []
    # The interpreter runs kernels on the CPU, slowly.
    everything = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    for found in pkgutil.iter_modules(kvfactory.kernels.__path__, "kvfactory.kernels."):
        if not everything and found.name not in _ON_EVERY_DEVICE:
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            absent.append(f"not checked: {found.name} needs triton, which is not installed")
            continue
        if hasattr(module, "check"):
            modules.append(module)
    return modules, absent


def run_checks(module: ModuleType, device: torch.device, dtype: torch.dtype) -> tuple[list[Check], str | None]:
    """A module's checks; where they could not even run, why."""
    try:
        return module.check(device, dtype), None
    except Exception as error:  # a kernel that does not compile or launch is a finding, and the others still count
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [], f"{type(error).__name__}: {first}"


def examine(device: torch.device, show: Callable[[str], None] = print) -> bool:
    """Shows everything; false when a check failed."""
    for line in describe(device):
        show(line)
    modules, absent = checked_modules(device)
    for line in absent:
        show(line)
    done = failed = 0
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        if device.type == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
            show("not checked: bfloat16, which this GPU does not have")
            continue
        for module in modules:
            checks, crash = run_checks(module, device, dtype)
            if crash:
                show(f"FAILED  {module.__name__} {kind}: {crash}")
            for check in checks:
                state = "ok    " if check.passed else "FAILED"
                show(f"{state}  {check.name}, {kind}: error {check.error:.2g}, allowed {check.allowed:.2g}")
            done += len(checks) + bool(crash)
            failed += sum(not check.passed for check in checks) + bool(crash)
    show(f"{done} checks, {failed} failed")
    return failed == 0


def named_device(name: str) -> torch.device:
    """The device of a --device value.

    Raises:
        ValueError: no such device, here or anywhere.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is not cpu, cuda or cuda:N, where the definitions and kernels run")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all checks passed, 1 one failed, 2 a value that cannot be followed."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.doctor", description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda or cuda:N; the first GPU where there is one")
    try:
        device = named_device(parser.parse_args(argv).device)
        why_torch(device)
    except ValueError as error:
        print(f"python -m kvfactory.doctor: {error}", file=sys.stderr)
        return 2
    return 0 if examine(device) else 1


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
