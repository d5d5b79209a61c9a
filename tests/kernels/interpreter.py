"""Kernels without a GPU: their cases run in a process of their own, since Triton chooses its interpreter at import.

The files `*_cases.py` hold ordinary tests that pytest collects only when they are named. Here they run interpreted; on
a GPU they run as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run_cases(name: str, *, interpreted: bool) -> None:
    """Runs tests/kernels/{name} in a fresh process; fails with its output when a test in it fails."""
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    case_file = Path(__file__).with_name(name)
    done = subprocess.run(
        [*command, str(case_file)], env=environ, cwd=case_file.parents[2], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.fail(f"{name}:\n{done.stdout}{done.stderr}", pytrace=False)


def teach_bfloat16() -> None:
    """Makes the interpreter treat bfloat16 as a GPU does.

    It keeps such numbers as 16-bit integers, multiplies those integers in `tl.dot`, and cuts float32 off where a GPU
    rounds to the nearest.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton.runtime.interpreter import tl as language

    product, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle: TensorHandle) -> TensorHandle:
        return cast(None, handle, language.float32) if handle.dtype.scalar == language.bfloat16 else handle

    def rounding_cast(self: InterpreterBuilder, handle: TensorHandle, kind: language.dtype) -> TensorHandle:
        if handle.dtype.scalar == language.float32 and kind.scalar == language.bfloat16:
            rounded = torch.from_numpy(handle.data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
            return TensorHandle(rounded, language.bfloat16)
        return cast(self, handle, kind)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest)
    InterpreterBuilder.cast_impl = rounding_cast
