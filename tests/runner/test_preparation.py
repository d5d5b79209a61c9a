"""Labels, notes, and what the record says about the prompts and the window."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from kvfactory import attach, generate
from kvfactory.example import Example
from kvfactory.loading import Computation
from kvfactory.plan import make_plan
from kvfactory.preparation import _computation_notes


@pytest.mark.parametrize(
    "argv, label",
    [
        ((), "SnapKV"),
        (("--kv_cache_granularity", "query_head", "--gqa_score_agg", "mean"), "SnapKV"),
        (("--window_size", "8", "--kernel_size", "7"), "SnapKV"),
        (("--attn_implementation", "sdpa", "--dtype", "float32", "--decode", "loop", "--seed", "7"), "SnapKV"),
        (("--merge", "None", "--quant_method", "none", "--overwrite", "--save_prompts"), "SnapKV"),
        (("--kv_cache_granularity", "kv_head"), "SnapKV+kv_head"),
        (("--kv_cache_granularity", "kv_head", "--gqa_score_agg", "max"), "SnapKV+kv_head+max"),
        (("--merge", "Pivot", "--preset", "paper"), "SnapKV+pivot+paper"),
        (("--merge", "weighted", "--merge_target", "v"), "SnapKV+weighted-v"),
        (("--preset", "paper"), "SnapKV+paper"),
        (("--preset", "paper", "--window_size", "32"), "SnapKV+paper"),
        (("--protocol", "factory", "--max_input_length", "1500"), "SnapKV+factory+h"),
        (("--window_size", "16"), "SnapKV+h"),
        (("--attn_implementation", "eager"), "SnapKV+h"),
        (("--dtype", "bfloat16"), "SnapKV+h"),
        (("--chat_template", "none"), "SnapKV+h"),
        (("--stop_newline", "trec"), "SnapKV+h"),
        (("--max_num_examples", "1", "--sample_method", "random"), "SnapKV+h"),
        (("--max_num_examples", "1"), "SnapKV"),
        (("--run_name", "mine"), "mine"),
    ],
)
def test_labels(run, argv, label):
    run.common = run.common[: run.common.index("--max_new_tokens")]
    found = run.job("--method", "snapkv", *argv).runs[0].paths.label
    assert found == label or (label.endswith("+h") and found.startswith(label) and len(found) == len(label) + 6)


def test_the_seed_counts_for_randomised_methods_alone(run):
    run.common = run.common[: run.common.index("--max_new_tokens")]
    labels = [r.paths.label for r in run.job("--method", "snapkv,random", "--seed", 7).runs]
    assert labels[0] == "SnapKV" and labels[1].startswith("Random+h")


def test_notes_are_told_once_and_recorded(run, capsys):
    run("--method", "snapkv,fullkv", "--max_capacity_prompts", 300, "--kernel_size", 5)
    error = capsys.readouterr().err
    for sentence in (
        "SnapKV scores with the last 8 tokens, of which 8 are chat template on hotpotqa",
        "prompts are kvfactory's own wording",
        "FullKV keeps every token: the budget has no effect",
        "FullKV does not read --kernel_size",
        "SnapKV at --kv_cache_granularity query_head and budget 300 holds a larger cache than FullKV would",
    ):
        assert error.count(sentence) == 1, sentence
        record = run.record(1 if sentence.startswith("FullKV") else 0)
        assert any(sentence in note for note in record["notes"])


def test_recalled_preset_values_in_force_are_told(run, capsys):
    run("--method", "scissorhands", "--preset", "paper", "--max_capacity_prompts", 64)
    assert "is recalled, not read" in capsys.readouterr().err and run.record()["settings"]["recalled_settings"]


def test_the_record_says_what_the_model_saw(run):
    run("--method", "snapkv,fullkv")
    facts = run.record()["datasets"]["hotpotqa"]
    assert facts["prompt_head"].startswith("<|im_start|>user\nBelow are several passages")
    assert facts["prompt_tail"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert facts["window_text"] == "sistant\n"  # 8 tokens of one byte
    assert (facts["examples"], facts["rows"], facts["max_new_tokens"]) == (3, 3, 5)
    assert facts["template_tail_tokens"] > 8 and facts["window_template_tokens"] == 8
    assert "window_text" not in run.record(1)["datasets"]["hotpotqa"]
    settings = run.record()["settings"]
    assert settings["prompts"]["source"] == "kvfactory" and settings["dtype"] == "float32"
    assert len(settings["model"]["weights_sha256"]) == 64 and settings["encoding"]["chat_wrap"] == "tokenizer"
    assert run.record(1)["settings"]["max_capacity_prompts"] is None
    segment = run.record()["segments"][0]
    assert segment["hardware"]["device"] == "cpu" and segment["versions"]["torch"]
    assert run.record()["counts"]["hotpotqa"]["wall_s"] > 0


def test_the_window_in_front_of_the_template(run, model, capsys):
    """Byte tokens: the template tail is <|im_end|>, newline, <|im_start|>, "assistant", newline, so 13 tokens."""
    budget = ("--max_capacity_prompts", 64, "--window_skip_template", "on")
    assert run("--method", "snapkv,fullkv", *budget) == 0
    error, record = capsys.readouterr().err, run.record()
    facts = record["datasets"]["hotpotqa"]
    assert (facts["template_tail_tokens"], facts["window_template_tokens"]) == (13, 0)
    assert facts["window_text"] == "\nAnswer:"
    assert "chat template" not in error and "SnapKV does not read" not in error
    assert error.count("FullKV does not read --window_skip_template: no effect on it") == 1
    assert record["settings"]["window_skip_template"] is True
    assert run.record(1)["settings"]["window_skip_template"] is None
    labels = [planned.paths.label for planned in run.last.runs]
    assert labels[0].startswith("SnapKV+h") and labels[1].startswith("FullKV+h")  # --max_new_tokens counts for both
    moved, job = run.rows(), run.last
    assert all(row["kept_tokens"]["per_layer"] == [64, 64, 64] for row in moved)
    run("--method", "snapkv,fullkv", "--max_capacity_prompts", 64)
    assert [planned.paths.label for planned in run.last.runs][1] == labels[1] != labels[0]
    assert run.record()["settings"]["window_skip_template"] is False
    assert [row["pred"] for row in run.rows()] != [row["pred"] for row in moved]
    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    attach(loaded, "snapkv", max_capacity_prompt=64)
    part = job.parts["hotpotqa"]
    for record, row in zip(part.dataset.records, moved, strict=True):
        ids = Example.of(job, part, record).prompt.input_ids
        tokens = generate(loaded, ids, 5, eos_token_id=[257], template_tail=13).rows[0].tokens
        assert job.encoder.decode(tokens, part.dataset.task)[0] == row["pred"]


def test_a_template_without_room_is_an_error_of_each_example(run):
    skip = ("--window_skip_template", "on", "--datasets", "hotpotqa")
    assert run("--method", "snapkv", "--max_capacity_prompts", 21, *skip) == 1
    sentence = "--window_skip_template on keeps 13 template tokens and the window of 8 tokens before them"
    assert all(sentence in row["error"] and "--max_capacity_prompts 21" in row["error"] for row in run.rows())
    assert run("--method", "snapkv", "--max_capacity_prompts", 22, *skip) == 0


def test_methods_without_a_window_refuse_to_move_it(run):
    readers = "SnapKV, PyramidKV, AdaKV, HeadKV"
    with pytest.raises(ValueError, match=f"template on is not read by FullKV or H2O, only by .*: {readers}"):
        run.job("--method", "fullkv,h2o", "--window_skip_template", "on")
    for notes, argv in ((1, ("--chat_template", "none")), (0, ())):
        [planned] = run.job("--method", "snapkv", "--window_skip_template", "on", *argv).runs
        assert sum("no prompt ends in chat template" in note for note in planned.notes) == notes


def test_what_runs_more_slowly_than_it_could_is_told(monkeypatch):
    plan = make_plan("oracle")
    on_gpu = Computation("cuda", "bfloat16", "sdpa", "loop")
    monkeypatch.setattr("kvfactory.preparation.why_torch", lambda device: None)
    assert _computation_notes(plan, on_gpu, None) == ()
    [note] = _computation_notes(plan, on_gpu, "Oracle chooses at every step what it reads")
    assert note == "Oracle decodes in the loop instead of a graph: Oracle chooses at every step what it reads"
    monkeypatch.setattr("kvfactory.preparation.why_torch", lambda device: "they have not been measured here")
    [note] = _computation_notes(plan, on_gpu, "they have not been measured here")
    assert note.startswith("plain torch runs instead of the Triton kernels") and note.endswith("not been measured here")
    assert _computation_notes(plan, Computation("cpu", "float32", "sdpa", "loop"), None) == ()
