"""Where a run's files are: `{save_dir}/{model}_{budget}/{dataset}/{label}.json` and `.../meta/{label}.json`.

The layout is KVCache-Factory's, with the label in place of the bare method name, so that two settings never share a
file. A shard writes `{label}.shard{K}of{N}.json` in both places until `kvfactory.reports.shards` joins them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfactory.reports.files import check_file_name

_SHARD = re.compile(r"(?P<label>.+)\.shard(?P<k>\d+)of(?P<n>\d+)")


class RunPaths:
    """Paths of one method under one budget and one set of settings.

    Args:
        save_dir: value of --save_dir.
        model: local path or hub id; its last part, lower-cased, names the folder.
        budget_tag: "512" for a number of tokens, "r0.2" for a ratio, "bytes25" for a share of FullKV's bytes.
        label: file name without extension, from `settings_label` or --run_name.
        shard: (K, N) for shard K of N, counted from 0; None for a whole run.

    Raises:
        ValueError: a part cannot be a file name, or the shard is out of range.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        model: str | os.PathLike[str],
        budget_tag: str,
        label: str,
        shard: tuple[int, int] | None = None,
    ):
        self.save_dir = Path(save_dir)
        self.model_name = model_name(model)
        self.budget_tag = check_file_name(str(budget_tag), "budget")
        self.label = check_file_name(label, "result label (--run_name)")
        if _SHARD.fullmatch(label):
            raise ValueError(f"result label (--run_name) {label!r} ends like a shard's file name: choose another one")
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise ValueError(f"--shard_id {shard[0]} must be at least 0 and below --num_shards {shard[1]}")
        self.shard = shard

    @property
    def folder(self) -> Path:
        return self.save_dir / f"{self.model_name}_{self.budget_tag}"

    @property
    def file_name(self) -> str:
        return f"{self.label}.json" if self.shard is None else "{}.shard{}of{}.json".format(self.label, *self.shard)

    @property
    def meta(self) -> Path:
        """The run record's path."""
        return self.folder / "meta" / self.file_name

    def results(self, dataset: str) -> Path:
        """Path of the results on `dataset` (canonical name; a slash in it makes a folder)."""
        if dataset == "meta":
            raise ValueError("a dataset cannot be called 'meta': that folder holds the run records")
        parts = [check_file_name(part, "dataset") for part in dataset.split("/")]
        return self.folder.joinpath(*parts, self.file_name)

    def for_shard(self, shard: tuple[int, int] | None) -> RunPaths:
        """The same run's paths for one shard, or for the whole (None)."""
        return RunPaths(self.save_dir, self.model_name, self.budget_tag, self.label, shard)


def model_name(model: str | os.PathLike[str]) -> str:
    """Last part of a model's path or hub id in lower case, as KVCache-Factory names its folders."""
    path = os.path.normpath(model)
    if os.path.basename(path) in ("", ".", ".."):
        path = os.path.realpath(path)
    return check_file_name(os.path.basename(path).lower(), "model name (--model_path)")


def split_shard(stem: str) -> tuple[str, tuple[int, int] | None]:
    """Label and (K, N) of a file name without its extension; (stem, None) when it is no shard's."""
    match = _SHARD.fullmatch(stem)
    return (match["label"], (int(match["k"]), int(match["n"]))) if match else (stem, None)


def settings_label(method: str, named: Sequence[str], others: Mapping[str, Any]) -> str:
    """File label of one set of settings: `SnapKV+kv_head+kivi4`, with `+h` and six hex digits for all else.

    Args:
        method: canonical method name.
        named: ready tags of the non-default settings that have one, in their fixed order.
        others: every other result-relevant setting that is not at its default, by name. The hash does not depend
            on their order, nor on whether a whole number comes as int or float.

    Raises:
        ValueError: a tag is empty or holds a "+", or a value is not finite.
    """
    for tag in named:
        if not tag or "+" in tag:
            raise ValueError(f"label tag {tag!r} must not be empty or hold a '+', which separates tags")
    parts = [method, *named]
    if others:
        canonical = json.dumps(_canonical(dict(others)), sort_keys=True, separators=(",", ":"), allow_nan=False)
        parts.append("h" + hashlib.sha256(canonical.encode("ascii")).hexdigest()[:6])
    return check_file_name("+".join(parts), "result label")


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(v) for v in value]
    return value
