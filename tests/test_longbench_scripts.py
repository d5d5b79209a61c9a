"""The positional scripts of LongBench, and one of them with the real runner."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from calls import rows
from shell_scripts import ROOT, SIX, run_script
from tiny_checkpoint import save_checkpoint, write_dataset

from kvfactory.data.tasks import DEFAULT_DATASETS

FOLDER = "scripts_longBench"


@pytest.fixture
def bash(tmp_path):
    return lambda name, *arguments, **environment: run_script(tmp_path, f"{FOLDER}/{name}", *arguments, **environment)


def test_eval_sh_passes_the_originals_arguments_on(bash):
    done = bash("eval.sh", *SIX)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == "CUDA=0" and lines[1] == str(ROOT / "run_longbench.py")
    pairs = dict(zip(lines[2::2], lines[3::2], strict=True))
    assert pairs == {
        "--method": "snapkv",
        "--max_capacity_prompts": "128",
        "--attn_implementation": "sdpa",
        "--model_path": "some/model",
        "--save_dir": "./x/results_long_bench",
        "--use_cache": "True",
    }


@pytest.mark.parametrize(
    "tail, expected",
    [
        (("", "", ""), []),
        (("none", "None", "8"), []),
        (("pivot",), ["--merge", "pivot"]),
        (("none", "kivi", "4"), ["--quant_method", "kivi", "--nbits", "4"]),
        (("weighted", "kivi"), ["--merge", "weighted", "--quant_method", "kivi"]),
        (("", "", "8"), []),
    ],
)
def test_eval_sh_drops_what_is_none(bash, tail, expected):
    done = bash("eval.sh", *SIX, *tail, DATA_DIR="d")
    lines = done.stdout.splitlines()
    start = lines.index("True") + 1
    assert lines[start:] == [*expected, "--data_dir", "d"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "0 were given"),
        (SIX[:5], "5 were given"),
        ((*SIX, "", "", "", "x"), "10 were given"),
        (("snapkv", *SIX[1:]), "argument 1"),
        ((*SIX[:2], "many", *SIX[3:]), "argument 3"),
        ((*SIX[:3], "flash", *SIX[4:]), "argument 4"),
        (("0", "", *SIX[2:]), "argument 2"),
        ((*SIX[:5], ""), "argument 6"),
    ],
)
def test_eval_sh_prints_the_order_when_it_is_not_met(bash, arguments, told):
    done = bash("eval.sh", *arguments)
    assert done.returncode == 2 and not done.stdout and told in done.stderr
    assert "CUDA_VISIBLE_DEVICES method max_capacity_prompts attn_implementation source_path model_path" in done.stderr


def test_eval_methods_sh(bash):
    done = bash("eval_methods.sh", "", "snapkv,h2o", "all", "auto", "", "m")
    lines = done.stdout.splitlines()
    assert lines[0] == "CUDA=" and lines[3] == "snapkv,h2o" and lines[5] == "64,96,128,256,512,1024,2048,4096"
    done = bash("eval_methods.sh", "", "-", "64,128", "auto", "", "m", METHODS="a,b")
    assert done.stdout.splitlines()[3:6:2] == ["a,b", "64,128"]
    for wrong in (SIX[:5], (*SIX, "none"), (*SIX[:2], "some", *SIX[3:]), ("0", "", *SIX[2:])):
        done = bash("eval_methods.sh", *wrong)
        assert done.returncode == 2 and "CUDA_VISIBLE_DEVICES methods" in done.stderr and not done.stdout


def test_eval_sh_runs_the_real_runner(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, data = save_checkpoint(tmp_path / "tiny"), tmp_path / "data"
    for name in DEFAULT_DATASETS:
        write_dataset(data, name, 1, length=5)
    done = subprocess.run(
        [
            "bash",
            ROOT / "scripts" / FOLDER / "eval.sh",
            "",
            "snapkv",
            "32",
            "eager",
            f"{tmp_path}/o/",
            model,
            "none",
            "None",
            "8",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "DATA_DIR": str(data)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "o" / "results_long_bench")) == 16
