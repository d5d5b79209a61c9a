"""Flags that the benchmarks share."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.models import SHAPES
from kvfactory.methods import METHODS
from kvfactory.settings import whole_number


def parser(description: str | None) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description, allow_abbrev=False)
    flags.add_argument("--model", default="llama3-8b", choices=SHAPES, help="shape of the model; weights are random")
    flags.add_argument("--layers", type=whole_number, help="fewer layers than the shape has")
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    flags.add_argument("--seed", type=whole_number, default=0)
    flags.add_argument("--output", help="file that the JSON lines are appended to")
    return flags


def device_of(args: argparse.Namespace) -> torch.device:
    """Raises ValueError where CUDA is asked for and absent."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here; the scripts themselves run with --device cpu")
    return torch.device(args.device)


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return getattr(torch, args.dtype)


def counts(flag: str, text: str) -> list[int]:
    """Positive numbers separated by commas."""
    try:
        found = [whole_number(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"--{flag} {text} is not a list of positive whole numbers separated by commas")
    return found


def names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Names separated by commas, each one of `known`; an empty text names none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise ValueError(f"--{flag} {part} is not one of {', '.join(known)}")
    return parts


def methods(text: str) -> list[str]:
    """Canonical method names."""
    return [METHODS.get(part.strip()).name for part in text.split(",")]


def row_counts(text: str) -> list[tuple[int, int | None]]:
    """`1,16@32768` -> [(1, None), (16, 32768)]: so many rows in flight, at all prompt lengths or at one."""
    found = []
    for part in text.split(","):
        number, _, length = part.partition("@")
        found.append((counts("rows", number)[0], counts("rows", length)[0] if "@" in part else None))
    return found


def main(run: Any, argv: list[str] | None = None) -> int:
    """Exit code of `run`; a user's mistake is one sentence."""
    try:
        return run(argv)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
