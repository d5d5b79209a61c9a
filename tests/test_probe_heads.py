"""`python -m kvfactory.probe_heads`: which trials count, the files it writes, resuming, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from planted import PLANTED_HEAD, ends, planted_model, probe_scores, probe_trials
from tiny_checkpoint import save_checkpoint

from kvfactory import attach, detach
from kvfactory.loading import open_checkpoint
from kvfactory.ops.head_scores import check_scores_fit, load_head_scores, sidecar_path
from kvfactory.probe.haystack import generated_haystack
from kvfactory.probe.log import TrialResult
from kvfactory.probe.needles import KINDS, needles
from kvfactory.probe.scoring import read_trial
from kvfactory.probe.trials import Trial, TrialMaker, make_trials, trials_sha256
from kvfactory.probe_heads import MIN_TRIALS, TooFewTrials, build_parser, enough_scores, main, probe_model

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "kvfactory" / "head_scores" / "SmolLM2-135M-Instruct_retrieval_heads.json"
SMALL = [
    "--min_length",
    "20",
    "--max_length",
    "350",
    "--num_lengths",
    "2",
    "--num_depths",
    "2",
    "--device",
    "cpu",
    "--quiet",
]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random Llama with a byte tokenizer: nothing in it retrieves, so generate mode never passes."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", layers=2)


def probe(checkpoint: Path, output: Path, *more: str) -> int:
    """The command line on the tiny checkpoint, teacher-forced, 12 trials."""
    flags = ["--model_path", str(checkpoint), "--output", str(output), "--probe_mode", "teacher_forced", *SMALL]
    return main([*flags, *more])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["generate", "teacher_forced"])
def test_planted_head_ranks_first(kind, mode, tmp_path):
    file = tmp_path / "planted.json"
    file.write_text(json.dumps(probe_scores(planted_model(), kind, mode)))
    values = load_head_scores(file).values
    assert np.unravel_index(values.argmax(), values.shape) == PLANTED_HEAD
    assert values[PLANTED_HEAD] > 0.9


def test_failing_trials_append_nothing():
    trials = probe_trials(12)
    wrong = {trial.name for trial in trials[:2]}
    results = probe_model(
        planted_model(), trials, "retrieval", "generate", stop=ends,
        quality=lambda output, trial: 0.5 if trial.name in wrong else 0.51,
    )  # fmt: skip
    assert [results[trial.name].passed for trial in trials] == [False] * 2 + [True] * 10
    assert len(enough_scores(results, trials)) == 10


def test_teacher_forcing_has_no_gate():
    trials = probe_trials(10)
    results = probe_model(planted_model(), trials, "retrieval", "teacher_forced", quality=lambda output, trial: 0.0)
    assert all(result.passed and result.quality is None for result in results.values())


def test_fewer_than_ten_are_refused():
    trials = [Trial(str(i), (1, 2), (0, 1), (2,)) for i in range(12)]
    results = {t.name: TrialResult(t.name, i < 9, 1.0, "", [[1.0]]) for i, t in enumerate(trials)}
    with pytest.raises(TooFewTrials, match="only 9 of 12 probe trials passed"):
        enough_scores(results, trials)
    results["9"] = TrialResult("9", True, 1.0, "", [[1.0]])
    assert len(enough_scores(results, trials)) == MIN_TRIALS
    blind = {t.name: TrialResult(t.name, True, 1.0, "", [[0.0]]) for t in trials}
    with pytest.raises(TooFewTrials, match="rank no heads"):
        enough_scores(blind, trials)


def test_default_trials_are_the_published_number():
    options = build_parser().parse_args(["--model_path", "m", "--output", "o"])
    assert (options.num_lengths, options.num_depths, options.min_length) == (5, 10, 0)
    assert options.num_lengths * options.num_depths * len(needles("retrieval")) >= 150


def test_files(checkpoint, tmp_path):
    output = tmp_path / "new" / "tiny-llama.json"
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    text = output.read_text()
    assert text.count("\n") == 1 and text.endswith("\n")
    content = json.loads(text)
    assert list(content) == [f"{layer}-{head}" for layer in range(2) for head in range(4)]
    assert {len(numbers) for numbers in content.values()} == {32}  # 2 lengths x 2 depths x 8 needles, all distinct
    about = json.loads(sidecar_path(output).read_text())
    assert (about["model"], about["layers"], about["heads"]) == ("tiny-llama", 2, 4)
    assert (about["kind"], about["probe_mode"], about["trials"], about["passed"]) == (
        "reasoning",
        "teacher_forced",
        32,
        32,
    )
    assert about["seed"] == 42 and len(about["weights_sha256"]) == 64 and about["haystack"]["source"] == "generated"
    assert str(tmp_path) not in json.dumps(about) and str(checkpoint.parent) not in json.dumps(about)
    assert sorted(p.name for p in output.parent.iterdir()) == [
        "tiny-llama.json", "tiny-llama.json.meta.json", "tiny-llama.json.trials.jsonl",
    ]  # fmt: skip


def test_file_is_for_this_model_only(checkpoint, tmp_path):
    output = tmp_path / "scores.json"
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    scores = load_head_scores(output)
    check_scores_fit(scores, 2, 4, str(checkpoint))
    with pytest.raises(ValueError, match="probed on tiny-llama, not on other/model"):
        check_scores_fit(scores, 2, 4, "other/model")
    with pytest.raises(ValueError, match="2 layers x 4 heads"):
        check_scores_fit(scores, 2, 8, str(checkpoint))
    config = open_checkpoint(str(checkpoint)).config
    model = __import__("transformers").AutoModelForCausalLM.from_config(config)
    attach(model, "headkv", head_path=str(output), max_capacity_prompt=16)
    detach(model)


def test_two_runs_are_equal(checkpoint, tmp_path):
    for name in ("a.json", "b.json"):
        assert probe(checkpoint, tmp_path / name, "--kind", "reasoning") == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_killed_and_resumed_equals_uninterrupted(checkpoint, tmp_path):
    """A kill -9 in the middle, a torn line on top, then the same command again."""
    assert probe(checkpoint, tmp_path / "whole.json", "--kind", "reasoning") == 0
    output = tmp_path / "killed.json"
    log = Path(f"{output}.trials.jsonl")
    flags = ["--model_path", str(checkpoint), "--output", str(output), "--kind", "reasoning", *SMALL]
    command = [sys.executable, "-m", "kvfactory.probe_heads", *flags, "--probe_mode", "teacher_forced"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and (not log.is_file() or log.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = log.read_bytes()
    assert 4 <= done.count(b"\n") < 33 and not output.exists()
    log.write_bytes(done[: done.rindex(b"\n") + 1] + b'{"trial": "torn')
    first = done.split(b"\n")[1]
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    assert output.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert sidecar_path(output).read_bytes() == sidecar_path(tmp_path / "whole.json").read_bytes()
    assert log.read_bytes() == Path(f"{tmp_path / 'whole.json'}.trials.jsonl").read_bytes()
    assert first in log.read_bytes()


def test_known_trials_are_not_run_again(checkpoint, tmp_path, monkeypatch):
    output = tmp_path / "scores.json"
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    before = output.read_bytes()
    monkeypatch.setattr("kvfactory.probe_heads.read_trial", lambda *args: pytest.fail("a finished trial ran again"))
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    assert output.read_bytes() == before


def test_stopped_by_a_signal(checkpoint, tmp_path, monkeypatch):
    output, calls = tmp_path / "scores.json", []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return read_trial(*args)

    monkeypatch.setattr("kvfactory.probe_heads.read_trial", interrupted)
    assert probe(checkpoint, output, "--kind", "reasoning") == 75
    assert Path(f"{output}.trials.jsonl").read_bytes().count(b"\n") == 4 and not output.exists()


def test_a_model_that_answers_nothing_is_told_so(checkpoint, tmp_path, capsys):
    output = tmp_path / "scores.json"
    assert main(["--model_path", str(checkpoint), "--output", str(output), "--kind", "reasoning", *SMALL]) == 1
    said = capsys.readouterr().err
    assert "only 0 of 32 probe trials passed" in said and "--probe_mode teacher_forced" in said
    assert said.count("\n") == 1 and not output.exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--haystack_dir", "nowhere"], "--haystack_dir nowhere does not exist"),
        (["--haystack_dir", "."], "holds no .txt file"),
        (["--num_depths", "1", "--num_lengths", "1"], "make 8 trials of the 8 needles, and 10 must pass"),
        (["--num_depths", "0"], "--num_depths 0 must be at least 1"),
        (["--min_length", "-1"], "--min_length -1 must be at least 0"),
        (["--max_length", "10"], "--max_length 10 must be at least 1 and not below --min_length 20"),
        (["--max_length", "2000"], "the model's window has 2048"),
        (["--model_path", "nowhere"], "--model_path nowhere"),
        (["--output", "."], "is a folder"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(flags, said, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfactory.probe_heads.load_model", lambda *args: pytest.fail("weights were loaded"))
    assert probe(checkpoint, tmp_path / "scores.json", "--kind", "reasoning", *flags) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_log_of_another_probe_is_not_mixed_in(checkpoint, tmp_path, capsys):
    output = tmp_path / "scores.json"
    assert probe(checkpoint, output, "--kind", "reasoning") == 0
    before = output.read_bytes()
    assert probe(checkpoint, output, "--kind", "reasoning", "--seed", "7") == 2
    said = capsys.readouterr().err
    assert "trials of another probe" in said and "--overwrite" in said
    assert output.read_bytes() == before
    assert probe(checkpoint, output, "--kind", "reasoning", "--seed", "7", "--overwrite") == 0
    assert output.read_bytes() != before


def test_a_finished_file_without_its_log_is_not_replaced(checkpoint, tmp_path, capsys):
    output = tmp_path / "scores.json"
    output.write_text("[[1, 2]]")
    assert probe(checkpoint, output, "--kind", "reasoning") == 2
    assert "use --overwrite" in capsys.readouterr().err and output.read_text() == "[[1, 2]]"


def test_broken_log(checkpoint, tmp_path, capsys):
    output = tmp_path / "scores.json"
    Path(f"{output}.trials.jsonl").write_text("no json\n")
    assert probe(checkpoint, output, "--kind", "reasoning") == 2
    assert "is no log of trials" in capsys.readouterr().err


def test_committed_scores_of_smollm2():
    scores = load_head_scores(COMMITTED)
    check_scores_fit(scores, 30, 9, "some/where/SmolLM2-135M-Instruct")
    about = json.loads(sidecar_path(COMMITTED).read_text())
    assert about["model"] == "SmolLM2-135M-Instruct" and about["passed"] >= 30
    assert len(json.loads(COMMITTED.read_text())["0-0"]) == about["passed"]
    with pytest.raises(ValueError, match="probed on SmolLM2-135M-Instruct"):
        check_scores_fit(scores, 30, 9, "SmolLM2-135M")


def test_committed_scores_are_of_todays_trials():
    """Needles, text or placement changed: the file has to be made again (kvfactory/head_scores/README.md)."""
    about = json.loads(sidecar_path(COMMITTED).read_text())
    maker = TrialMaker(open_checkpoint("smollm2").tokenizer, generated_haystack(about["seed"]))
    trials = make_trials(maker, needles(about["kind"]), about["lengths"], about["depths"])
    assert len(trials) == about["trials"] and trials_sha256(trials) == about["trials_sha256"]
