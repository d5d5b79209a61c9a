"""The positional scripts of RULER and of the needle, and what all scripts share."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest
from shell_scripts import ROOT, SIX, run_script

RULER, NEEDLE = "scripts_ruler/eval.sh", "scripts_needle/eval.sh"
ORDER = "CUDA_VISIBLE_DEVICES method max_capacity_prompts attn_implementation source_path model_path"


@pytest.fixture
def bash(tmp_path):
    return partial(run_script, tmp_path)


def words(done):
    """(the runner, its options) of a call that went through."""
    assert done.returncode == 0 and not done.stderr, done.stderr
    cuda, runner, *options = done.stdout.splitlines()
    assert cuda == "CUDA=0"
    return runner, options


def expected(folder, *more):
    options = ["--method", "snapkv", "--max_capacity_prompts", "128", "--attn_implementation", "sdpa"]
    return [*options, "--model_path", "some/model", "--save_dir", f"./x/{folder}", *more]


@pytest.mark.parametrize(
    "tail, more",
    [
        ((), []),
        (("", ""), []),
        (("none", "4"), []),
        (("None",), []),
        (("kivi", "4"), ["--quant_method", "kivi", "--nbits", "4"]),
        (("kivi",), ["--quant_method", "kivi"]),
        (("kivi", "none"), ["--quant_method", "kivi"]),
    ],
)
def test_ruler_eval_sh(bash, tail, more):
    runner, options = words(bash(RULER, *SIX, *tail))
    assert runner == str(ROOT / "run_ruler.py")
    assert options == expected("results_ruler", "--use_cache", "True", *more)


def test_ruler_eval_sh_reads_the_environment(bash):
    _, options = words(bash(RULER, *SIX, "kivi", DATA_DIR="d r", LENGTHS="4096,8192"))
    assert options[-6:] == ["--quant_method", "kivi", "--lengths", "4096,8192", "--data_dir", "d r"]


@pytest.mark.parametrize(
    "tail, more",
    [
        ((), []),
        (("1000", "8000", "500"), ["--s_len", "1000", "--e_len", "8000", "--step", "500"]),
        (("1000",), ["--s_len", "1000"]),
        (("", "8000", ""), ["--e_len", "8000"]),
    ],
)
def test_needle_eval_sh(bash, tail, more):
    runner, options = words(bash(NEEDLE, *SIX, *tail))
    assert runner == str(ROOT / "run_needle_in_haystack.py")
    assert options == expected("results_needle", *more)


BAD = [
    ((), "0 were given"),
    (SIX[:5], "5 were given"),
    (("snapkv", *SIX[1:]), "argument 1"),
    (("0", "", *SIX[2:]), "argument 2"),
    ((*SIX[:2], "many", *SIX[3:]), "argument 3"),
    ((*SIX[:3], "flash", *SIX[4:]), "argument 4"),
    ((*SIX[:5], ""), "argument 6"),
]


@pytest.mark.parametrize(
    "script, arguments, told",
    [(script, *case) for script in (RULER, NEEDLE) for case in BAD]
    + [
        (RULER, (*SIX, "", "", ""), "6 to 8 arguments are needed, 9 were given"),
        (NEEDLE, (*SIX, "1", "2", "3", "4"), "6 to 9 arguments are needed, 10 were given"),
        (NEEDLE, (*SIX, "1000", "8k"), "e_len '8k' (argument 8) is no number of tokens"),
        (NEEDLE, (*SIX, "1000", "8000", "0"), "step '0' (argument 9)"),
    ],
)
def test_the_order_is_printed_when_it_is_not_met(bash, script, arguments, told):
    done = bash(script, *arguments)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("eval.sh: ") and told in done.stderr.splitlines()[0] and ORDER in done.stderr


def test_ruler_eval_methods_sh(bash):
    _, options = words(bash("scripts_ruler/eval_methods.sh", "0", "snapkv,h2o", "all", *SIX[3:], LENGTHS="512"))
    assert options[1:4:2] == ["snapkv,h2o", "64,96,128,256,512,1024,2048,4096"] and "./x/results_ruler" in options
    assert options[-2:] == ["--lengths", "512"]
    _, options = words(bash("scripts_ruler/eval_methods.sh", "0", "-", "64,128", *SIX[3:], METHODS="a,b"))
    assert options[1:4:2] == ["a,b", "64,128"]
    for wrong in (SIX[:5], (*SIX, "none"), (*SIX[:2], "some", *SIX[3:]), ("0", "", *SIX[2:])):
        done = bash("scripts_ruler/eval_methods.sh", *wrong)
        assert done.returncode == 2 and "CUDA_VISIBLE_DEVICES methods" in done.stderr and not done.stdout


def test_ruler_metrics_sh(bash, tmp_path):
    folder = tmp_path / "results" / "4096" / "vt"
    folder.mkdir(parents=True)
    row = {"_id": "0", "answers": ["cat"], "pred": "a cat"}
    (folder / "SnapKV.json").write_text(json.dumps(row) + "\n")
    done = bash("scripts_ruler/metrics.sh", tmp_path / "results", PYTHON=sys.executable)
    assert done.returncode == 0 and "SnapKV" in done.stdout
    assert (tmp_path / "results" / "results.csv").is_file()
    for arguments in ((), (tmp_path / "results", "extra")):
        done = bash("scripts_ruler/metrics.sh", *arguments)
        assert done.returncode == 2 and done.stderr.startswith("usage:")
