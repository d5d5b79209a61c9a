"""run_longbench.py from outside: exit codes, refusals that write nothing, kills, signals, real model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import calls
import pytest
from calls import rows, typed, wait_for_row
from tiny_checkpoint import make_record, save_checkpoint, write_dataset, write_records

import run_longbench

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def no_cache(request, monkeypatch, tmp_path):
    if "slow" not in request.keywords:
        monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data", "hotpotqa", 4)
    return tmp_path / "data"


@pytest.fixture
def argv(model, data, tmp_path):
    """A call that works, as a dict of flag to value."""
    flags = {"method": "snapkv", "model_path": model, "data_dir": data, "save_dir": tmp_path / "out"}
    return flags | {"datasets": "hotpotqa", "max_capacity_prompts": 32, "device": "cpu", "max_new_tokens": 4}


def files_below(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*")) if folder.exists() else []


def refused(capsys, arguments):
    return calls.refused(capsys, run_longbench.main, arguments)


def test_a_call_ends_with_the_table(argv, capsys, tmp_path):
    assert run_longbench.main(typed(argv)) == 0
    out, error = capsys.readouterr()
    assert out.startswith("| method") and "python eval.py --results_dir" in out
    assert "hotpotqa 4/4" in error
    assert run_longbench.main(typed(argv, "--quiet")) == 0  # nothing left to do, the table again
    again = capsys.readouterr()
    assert again.out == out and "4/4" not in again.err


def test_a_row_without_its_fields_is_refused(argv, capsys, tmp_path):
    assert run_longbench.main(typed(argv)) == 0
    [file] = (tmp_path / "out").glob("*/hotpotqa/*.json")
    lines = file.read_text().splitlines()
    damaged = "\n".join([*lines[:-1], '{"_id":"hotpotqa-3"}']) + "\n"
    file.write_text(damaged)
    capsys.readouterr()
    assert run_longbench.main(typed(argv)) == 2  # after the notes
    error = capsys.readouterr().err
    assert f"\nrun_longbench.py: {file}: the row with _id 'hotpotqa-3' has no pred" in error
    assert "Traceback" not in error
    assert file.read_text() == damaged


def test_eval_recomputes_the_table(argv, tmp_path, capsys):
    assert run_longbench.main(typed(argv | {"method": "snapkv,fullkv"})) == 0
    folder = tmp_path / "out" / "tiny_32"
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", "--results_dir", folder], capture_output=True, text=True, check=True
    )
    assert "stored score" not in done.stdout and "SnapKV" in done.stdout
    assert (folder / "results.csv").is_file()


# --- bad input


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"method": "snapvk"}, "Did you mean SnapKV"),
        ({"datasets": "hotpotq"}, "Did you mean hotpotqa"),
        ({"merge": "pivotal"}, "unknown merge 'pivotal'"),
        ({"quant_method": "kivii"}, "unknown quantiser 'kivii'"),
        ({"max_capacity_prompts": 8}, "--max_capacity_prompts 8 must be larger than the window of 8"),
        ({"max_capacity_prompts": 7}, "--max_capacity_prompts 7 must be larger than the window of 8"),
        ({"max_capacity_prompts": "512,8"}, "--max_capacity_prompts 8"),
        ({"max_capacity_prompts": 0}, "--max_capacity_prompts 0"),
        ({"max_capacity_prompts": 32, "max_capacity_prompts_ratio": 0.2}, "give one of them"),
        ({"kernel_size": 4}, "--kernel_size 4 must be odd"),
        ({"kernel_size": "a"}, "--kernel_size 'a' is not a whole number"),
        ({"pooling": "meanpool"}, "--pooling 'meanpool' is not one of maxpool, avgpool"),
        ({"sinks": 4}, "--sinks is not read by SnapKV"),
        ({"method": "fullkv", "window_size": 8}, "--window_size is not read by FullKV"),
        ({"model_path": "/no/such/model"}, "--model_path /no/such/model does not exist"),
        ({"data_dir": "/no/such/data"}, "--data_dir /no/such/data is not a folder"),
        ({"datasets": "hotpotqa,trec"}, "no data for dataset trec"),
        ({"thinking": "sometimes"}, "--thinking 'sometimes'"),
        ({"thinking": "on"}, "has no thinking block"),
        ({"max_input_length": 1}, "--max_input_length 1"),
        ({"max_input_length": 4000}, "--max_input_length 4000 leaves no room"),
        ({"max_new_tokens": 2047}, "--max_new_tokens 2047 leaves no room"),
        ({"protocol": "factory"}, "pass --max_input_length"),
        ({"protocol": "factory", "chat_template": "none"}, "cannot be combined with --protocol factory"),
        ({"attn_implementation": "flash_attention_2"}, "--attn_implementation flash_attention_2 needs"),
        ({"use_cache": "False"}, "--use_cache False"),
        ({"run_name": "a/b"}, "--run_name"),
        ({"run_name": ""}, "--run_name is empty"),
        ({"save_dir": ""}, "--save_dir is empty"),
        ({"seed": -1}, "--seed -1 is not a whole number from 0 to 4294967295"),
        ({"seed": 2**32}, "--seed 4294967296 is not"),
        ({"max_input_length": 2045}, "--max_input_length 2045 leaves no room for the 4 new tokens of hotpotqa"),
        ({"num_shards": 2, "shard_id": 5}, "--shard_id 5"),
        ({"decode": "fast"}, "invalid choice: 'fast'"),
        ({"decode": "graph"}, "--decode graph replays CUDA graphs and needs --device cuda"),
        ({"no_such_flag": 1}, "unknown argument --no_such_flag"),
    ],
)
def test_bad_arguments_write_nothing(argv, capsys, tmp_path, monkeypatch, changes, told):
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("weights were loaded"))
    before = files_below(tmp_path)
    assert told in refused(capsys, typed(argv | changes))
    assert files_below(tmp_path) == before


def test_cuda_asked_for_and_absent(argv, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device cuda: there is no CUDA device" in refused(capsys, typed(argv | {"device": "cuda"}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line, told",
    [
        ("{broken", "hotpotqa.jsonl, line 2: broken JSON"),
        ('{"input": "x"}', "hotpotqa.jsonl, line 2: missing context"),
        (json.dumps(make_record("hotpotqa", 1) | {"answers": "x"}), "hotpotqa.jsonl, line 2: answers must be"),
        (json.dumps(make_record("hotpotqa", 1) | {"_id": 1}), "hotpotqa.jsonl, line 2: _id must be"),
        (json.dumps(make_record("hotpotqa", 0)), "hotpotqa.jsonl, line 2: _id 'hotpotqa-0' is already used"),
    ],
)
def test_bad_data_is_refused_before_weights_load(argv, data, capsys, monkeypatch, tmp_path, line, told):
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("weights were loaded"))
    good = json.dumps(make_record("hotpotqa", 0))
    (data / "hotpotqa.jsonl").write_text(f"{good}\n{line}\n")
    assert told in refused(capsys, typed(argv))
    assert not (tmp_path / "out").exists()


def test_an_answer_that_cannot_be_scored_is_refused(argv, data, capsys, tmp_path):
    write_records(data, "passage_retrieval_en", [make_record("hotpotqa", 1)])
    error = refused(capsys, typed(argv | {"datasets": "passage_retrieval_en"}))
    assert "passage_retrieval_en.jsonl, _id 'hotpotqa-1' cannot be scored" in error
    assert not (tmp_path / "out").exists()


def test_bad_prompt_files_are_refused(argv, data, capsys, tmp_path):
    (data / "config").mkdir()
    (data / "config" / "dataset2prompt.json").write_text("{")
    assert "dataset2prompt.json cannot be read as JSON" in refused(capsys, typed(argv))
    (data / "config" / "dataset2prompt.json").write_text('{"hotpotqa": "no place"}')
    assert "has no {context}" in refused(capsys, typed(argv))
    assert not (tmp_path / "out").exists()


def test_a_damaged_model_is_refused(argv, model, capsys, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(capsys, typed(argv | {"model_path": broken}))
    torn = shutil.copytree(model, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    assert "model.safetensors cannot be read" in refused(capsys, typed(argv | {"model_path": torn}))
    fewer = shutil.copytree(model, tmp_path / "fewer")
    config = json.loads((fewer / "config.json").read_text())
    (fewer / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    assert "says 5 layers" in refused(capsys, typed(argv | {"model_path": fewer}))
    assert not (tmp_path / "out").exists()


def test_unusual_data_is_data(argv, data, capsys, tmp_path):
    odd = [make_record("hotpotqa", i) for i in range(3)]
    odd[0]["context"] += "\u2028 and \u0085 and {braces} \ud800"
    odd[1]["answers"] = []
    text = "\r\n\r\n".join(json.dumps(record, ensure_ascii=i == 0) for i, record in enumerate(odd))
    (data / "hotpotqa.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert run_longbench.main(typed(argv, "--save_context")) == 0
    (found,) = rows(tmp_path / "out").values()
    assert [row["context"] for row in found] == [record["context"] for record in odd]
    assert found[1]["answers"] == [] and found[1]["score"] == 0


@pytest.mark.parametrize("template", ["longbench", "none"])
def test_a_base_model_without_template_and_pad_token_runs(argv, tmp_path, capsys, template):
    base = save_checkpoint(tmp_path / "base", chat=False)
    assert run_longbench.main(typed(argv | {"model_path": base, "chat_template": template})) == 0
    capsys.readouterr()
    error = refused(capsys, typed(argv | {"model_path": base, "chat_template": "tokenizer"}))
    assert "this tokenizer has no chat template" in error


def test_a_family_off_the_attention_interface(argv, model, capsys, tmp_path):
    other = shutil.copytree(model, tmp_path / "bloom")
    config = {"model_type": "bloom", "vocab_size": 258, "hidden_size": 32, "n_layer": 3, "n_head": 4}
    (other / "config.json").write_text(json.dumps(config))
    error = refused(capsys, typed(argv | {"model_path": other, "max_input_length": 500}))
    assert "supported families" in error or "cannot build this model" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["file", "unwritable"])
def test_a_save_dir_that_cannot_be_written_to(argv, capsys, tmp_path, monkeypatch, kind):
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("")
    else:
        place = Path("/proc/kvfactory-results")  # no user, root included, can make a folder there
        if not Path("/proc").is_dir():
            pytest.skip("no /proc here")
    error = refused(capsys, typed(argv | {"save_dir": place}))
    assert f"--save_dir {place}" in error


def test_list_methods(capsys, monkeypatch):
    monkeypatch.setattr("kvfactory.listing.verify", lambda: pytest.fail("not asked for"))
    assert run_longbench.main(["--list_methods"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("FullKV", "SnapKV", "StreamingLLM"))
    for code in (0, 1):
        monkeypatch.setattr("kvfactory.listing.verify", lambda code=code: code)
        assert run_longbench.main(["--list_methods", "--verify"]) == code


# --- other processes


def start(arguments, **options):
    command = [sys.executable, str(ROOT / "run_longbench.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_nothing_but_our_own_lines_on_stderr_and_from_any_folder(argv, tmp_path):
    # transformers' deprecation and loading messages would come here; its own generate has most of them
    process = start(typed(argv | {"decode": "hf", "method": "snapkv,fullkv"}), cwd=tmp_path)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for line in error.splitlines():
        assert line.startswith(("note: ", "2 runs ")), error


def test_sigterm_stops_after_the_example_and_a_second_process_is_refused(argv, data, tmp_path, capsys):
    write_dataset(data, "hotpotqa", 24, length=60)
    argv["max_new_tokens"] = 60
    process = start(typed(argv))
    wait_for_row(process, tmp_path / "out")
    assert "is being written by process" in refused_after_notes(capsys, typed(argv))
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 75, error
    assert "SIGTERM" in error
    [path] = (tmp_path / "out").glob("*/hotpotqa/SnapKV*.json")
    before = path.read_bytes()
    assert before.endswith(b"\n") and 0 < before.count(b"\n") < 24
    assert not list((tmp_path / "out").rglob("*.lock"))
    assert run_longbench.main(typed(argv, "--quiet")) == 0
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 24


def refused_after_notes(capsys, arguments):
    """A refusal that comes after the notes of the run."""
    assert run_longbench.main(arguments) == 2
    return capsys.readouterr().err


ZYGOTE = """
# Imports once, then forks runs and kills them: after a random time, or when half of a row is written.
import importlib.util, json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("kvfactory_run_longbench", sys.argv[1])
cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cli)
from kvfactory import preparation, runner, summary
from kvfactory.reports import records
arguments, seconds, draw = json.loads(sys.argv[2]), float(sys.argv[4]), random.Random(int(sys.argv[5]))

def die_inside_row(which):
    real, count = os.write, [0]
    def write(fd, data):
        count[0] += bytes(data[:8]) == b'{"input"'
        if count[0] == which:
            real(fd, bytes(data[: len(data) // 2]))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, data)
    records.os.write = write

killed, again = 0, []
for attempt in range(int(sys.argv[3])):
    inside, after, which = draw.random() < 0.4, draw.random() * seconds, draw.randrange(1, 4)
    child = os.fork()
    if child == 0:
        if inside:
            die_inside_row(which)
        os._exit(cli.main(arguments + again))
    if not inside:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    killed += os.WIFSIGNALED(status)
    again = [] if os.WIFSIGNALED(status) else ["--overwrite"]  # it ended before the kill: from the start
print(json.dumps({"killed": killed, "exit": cli.main(arguments)}))
"""


@pytest.mark.parametrize("kills", [6, pytest.param(24, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_the_file_of_an_uninterrupted_run(argv, data, tmp_path, kills):
    write_dataset(data, "hotpotqa", 12, length=40)
    write_dataset(data, "trec", 4, length=40)
    argv |= {"datasets": "hotpotqa,trec", "max_new_tokens": 20, "method": "snapkv,random"}
    began = time.monotonic()
    assert run_longbench.main(typed(argv, "--quiet")) == 0
    whole, seed = time.monotonic() - began, random.randrange(10**6)
    killed = argv | {"save_dir": tmp_path / "killed"}
    parts = [json.dumps(typed(killed, "--quiet")), str(kills), str(whole / 2), str(seed)]
    command = [sys.executable, "-c", ZYGOTE, str(ROOT / "run_longbench.py"), *parts]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, (seed, done.stderr)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] >= kills / 2 and report["exit"] == 0, (seed, report, done.stderr)
    assert rows(tmp_path / "killed") == rows(tmp_path / "out"), f"seed {seed}"
    assert not list((tmp_path / "killed").rglob("*.tmp"))


# --- the bundled model


@pytest.mark.slow
def test_the_bundled_model_on_the_sample_suite(tmp_path, capsys):
    arguments = ["--method", "fullkv,snapkv", "--model_path", "smollm2", "--data_dir", str(ROOT / "data" / "sample")]
    arguments += ["--datasets", "lcc,trec", "--max_num_examples", "2", "--max_capacity_prompts", "128"]
    arguments += ["--kv_cache_granularity", "kv_head", "--save_dir", str(tmp_path / "out"), "--device", "cpu"]
    assert run_longbench.main(arguments) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "out" / "smollm2-135m-instruct_128"
    found = rows(folder)
    assert set(found) == {f"{d}/{m}+kv_head.json" for d in ("lcc", "trec") for m in ("FullKV", "SnapKV")}
    for name, answers in found.items():
        for row in answers:
            assert row["compressed"] == name.endswith("SnapKV+kv_head.json")
            if row["compressed"]:
                assert row["bytes_end"] < 0.3 * row["bytes_full"]
    assert "SnapKV+kv_head" in out
