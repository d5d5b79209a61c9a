"""Rows, the proof of compression, labels, notes and errors, with the runner inside this process on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_checkpoint import make_record, save_checkpoint, write_dataset, write_records
from transformers import LlamaForCausalLM

from kvfactory import attach, cli, generate
from kvfactory.data.own_prompts import OWN_PROMPTS
from kvfactory.example import Example
from kvfactory.generation import generate_rows
from kvfactory.loading import Computation
from kvfactory.methods import METHODS
from kvfactory.plan import make_plan
from kvfactory.preparation import _computation_notes, prepare
from kvfactory.reports.records import read_lines
from kvfactory.reports.stop import STOPPED, StopSignal
from kvfactory.runner import execute, merge
from kvfactory.summary import summary

ROW_FIELDS = (
    *("input", "answers", "pred", "length", "dataset", "language", "all_classes", "_id", "score"),
    *("prompt_tokens", "prompt_tokens_raw", "truncated", "question_seen", "new_tokens", "think_tokens", "finish"),
    *("prefill_s", "decode_s", "rows_in_flight", "near_ties", "peak_mem_bytes"),
    *("bytes_prompt", "bytes_end", "bytes_aux", "bytes_alloc", "bytes_full"),
    *("budget_means", "kept_tokens", "tokens_attended", "compressed"),
)
TIMINGS = ("prefill_s", "decode_s", "rows_in_flight", "peak_mem_bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "Tiny")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path / "data", "hotpotqa", 3)
    write_dataset(tmp_path / "data", "trec", 2)
    return tmp_path / "data"


class Runner:
    """Runs the pieces of run_longbench.py in this process."""

    def __init__(self, model, data, save_dir):
        self.common = ["--model_path", model, "--data_dir", data, "--save_dir", save_dir, "--quiet"]
        self.common += ["--datasets", "hotpotqa,trec", "--device", "cpu", "--max_new_tokens", "5"]
        self.common = [str(part) for part in self.common]
        self.save_dir = save_dir

    def job(self, *argv):
        return prepare(*cli.parse([*self.common, *map(str, argv)]))

    def __call__(self, *argv):
        self.last = self.job(*argv)
        with StopSignal() as stop:
            return execute(self.last, stop)

    def paths(self, number=0):
        return self.last.runs[number].paths

    def rows(self, dataset="hotpotqa", number=0):
        return [line.row for line in read_lines(self.paths(number).results(dataset))[0]]

    def record(self, number=0):
        return json.loads(self.paths(number).meta.read_text())


@pytest.fixture
def run(model, data, tmp_path):
    return Runner(model, data, tmp_path / "out")


def comparable(rows):
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in rows]


def test_a_row_has_exactly_the_agreed_fields(run):
    assert run("--method", "snapkv", "--max_capacity_prompts", 32) == 0
    assert run.paths().results("hotpotqa").relative_to(run.save_dir).parts[0] == "tiny_32"
    for dataset, count in (("hotpotqa", 3), ("trec", 2)):
        rows = run.rows(dataset)
        assert [row["_id"] for row in rows] == [f"{dataset}-{i}" for i in range(count)]
        assert all(tuple(row) == ROW_FIELDS for row in rows)


def test_what_a_row_says_about_its_cache(run):
    run("--method", "snapkv,pyramidkv,fullkv,oracle,streamingllm", "--max_capacity_prompts", 32)
    rows = {planned.plan.method: run.rows(number=i)[0] for i, planned in enumerate(run.last.runs)}
    prompt = rows["SnapKV"]["prompt_tokens"]
    token = 2 * 8 * 4  # bytes of one token in one head: key and value, head size 8, float32
    new = rows["SnapKV"]["new_tokens"] - 1  # the last token is not fed back
    snap = rows["SnapKV"]
    assert snap["bytes_prompt"] == 3 * 4 * 32 * token  # 3 layers, 4 query heads
    assert snap["bytes_end"] == 3 * 4 * (32 + new) * token
    assert snap["bytes_full"] == 3 * 2 * (prompt + new) * token
    assert snap["bytes_alloc"] >= snap["bytes_end"] and snap["bytes_aux"] == 0
    assert snap["kept_tokens"] == {"min": 32, "mean": 32, "max": 32, "per_layer": [32, 32, 32]}
    assert (snap["tokens_attended"], snap["compressed"], snap["budget_means"]) == (32 + new, True, "slots per head")
    pyramid = rows["PyramidKV"]["kept_tokens"]
    assert pyramid["per_layer"] == sorted(pyramid["per_layer"], reverse=True) and pyramid["max"] > pyramid["min"]
    assert (pyramid["min"], pyramid["max"]) == (pyramid["per_layer"][-1], pyramid["per_layer"][0])
    assert pyramid["mean"] == pytest.approx(sum(pyramid["per_layer"]) / 3)
    full = rows["FullKV"]
    assert full["bytes_end"] == full["bytes_full"] and not full["compressed"] and full["budget_means"] == "none"
    assert full["tokens_attended"] == prompt + full["new_tokens"] - 1
    assert rows["Oracle"]["tokens_attended"] == 32 and rows["Oracle"]["bytes_end"] == rows["Oracle"]["bytes_full"]
    assert rows["StreamingLLM"]["bytes_prompt"] == 3 * 2 * 32 * token  # the same for all heads: stored at kv heads


def test_a_method_that_evicts_while_decoding_stays_at_its_budget(run):
    run("--method", "h2o", "--max_capacity_prompts", 32, "--decode_evict", "on")
    row = run.rows()[0]
    assert row["tokens_attended"] == row["kept_tokens"]["mean"] == 32
    assert row["bytes_end"] == row["bytes_prompt"]


def test_heads_of_different_budgets(run):
    run("--method", "adakv", "--max_capacity_prompts", 40)
    kept = run.rows()[0]["kept_tokens"]
    assert kept["min"] < 40 < kept["max"] and kept["mean"] == pytest.approx(40, abs=1)
    assert run.rows()[0]["tokens_attended"] == pytest.approx(kept["mean"] + run.rows()[0]["new_tokens"] - 1)


def test_a_file_that_a_setting_names_counts_by_its_content(run, tmp_path):
    if "head_path" not in cli.method_settings():
        pytest.skip("no method reads a file")

    def label(name, score):
        scores = {f"{layer}-{head}": [score * (head + 1)] for layer in range(3) for head in range(4)}
        (tmp_path / name).write_text(json.dumps(scores))
        return run.job("--method", "headkv", "--head_path", tmp_path / name).runs[0].paths.label

    assert label("a.json", 1.0) == label("b.json", 1.0) != label("c.json", 0.5)


def test_a_prompt_below_the_budget_is_not_compressed(run):
    run("--method", "snapkv", "--max_capacity_prompts", 1500)
    row = run.rows()[0]
    assert not row["compressed"] and row["bytes_end"] == row["bytes_full"]
    assert row["kept_tokens"]["mean"] == row["prompt_tokens"]


def test_several_methods_and_budgets_equal_separate_calls(model, data, tmp_path):
    methods, budgets = ("snapkv", "h2o", "random"), (16, 64)
    together = Runner(model, data, tmp_path / "together")
    assert together("--method", ",".join(methods), "--max_capacity_prompts", "16,64") == 0
    for i, budget in enumerate(budgets):
        for j, method in enumerate(methods):
            alone = Runner(model, data, tmp_path / f"{method}{budget}")
            assert alone("--method", method, "--max_capacity_prompts", budget) == 0
            number = i * len(methods) + j
            assert alone.paths().results("trec").relative_to(alone.save_dir) == (
                together.paths(number).results("trec").relative_to(together.save_dir)
            )
            for dataset in ("hotpotqa", "trec"):
                assert comparable(alone.rows(dataset)) == comparable(together.rows(dataset, number))
            ours, theirs = alone.record(), together.record(number)
            assert (ours["settings"], ours["datasets"]) == (theirs["settings"], theirs["datasets"])


def test_what_no_budget_changes_is_decoded_once(run, monkeypatch):
    """FullKV under three budgets is one row per prompt, written to three files; SnapKV is three."""
    asked = []

    def counted(model, requests, **options):
        def watched():
            for request in requests:
                asked.append([plan.method for plan in request.plans])
                yield request

        return generate_rows(model, watched(), **options)

    monkeypatch.setattr("kvfactory.runner.generate_rows", counted)
    assert run("--method", "fullkv,snapkv", "--max_capacity_prompts", "32,48,64", "--datasets", "hotpotqa") == 0
    assert asked == [["FullKV", "SnapKV", "SnapKV", "SnapKV"]] * 3
    full = [run.rows(number=i) for i, planned in enumerate(run.last.runs) if planned.plan.method == "FullKV"]
    assert len(full) == 3 and comparable(full[0]) == comparable(full[1]) == comparable(full[2])
    run.paths(2).results("hotpotqa").unlink()  # FullKV's file under the second budget
    asked.clear()
    assert run("--method", "fullkv,snapkv", "--max_capacity_prompts", "32,48,64", "--datasets", "hotpotqa") == 0
    assert asked == [["FullKV"]] * 3 and comparable(run.rows(number=2)) == comparable(full[0])


def test_the_hf_path_gives_the_same_tokens_in_a_file_of_its_own(run):
    run("--method", "snapkv", "--max_capacity_prompts", 32)
    ours, name = run.rows(), run.paths().label
    run("--method", "snapkv", "--max_capacity_prompts", 32, "--decode", "hf")
    theirs = run.rows()
    assert run.paths().label != name
    assert [row["pred"] for row in ours] == [row["pred"] for row in theirs]
    assert all(row["bytes_prompt"] is None and row["prefill_s"] is None for row in theirs)
    assert [row["bytes_end"] for row in ours] == [row["bytes_end"] for row in theirs]


def test_prompt_and_context_are_saved_on_request(run, data):
    run("--method", "fullkv", "--save_prompts", "--save_context")
    record = json.loads((data / "hotpotqa.jsonl").read_text().splitlines()[0])
    row = run.rows()[0]
    assert row["context"] == record["context"]
    assert row["prompt"] == OWN_PROMPTS["hotpotqa"].format(**record)


def test_long_prompts_are_cut_and_counted(run):
    run("--method", "snapkv", "--max_capacity_prompts", 32, "--max_input_length", 200)
    rows = run.rows("trec")
    assert all(row["truncated"] and row["prompt_tokens"] <= 200 < row["prompt_tokens_raw"] for row in rows)
    assert run.record()["counts"]["trec"]["truncated"] == 2


# --- proof of compression ----------------------------------------------------------------------------------------


def test_a_layer_that_holds_something_else_is_an_error_that_names_it(run, monkeypatch):
    cluster = METHODS.get("snapkv")
    honest = cluster.declared

    def declared(self, context):
        counts = honest(self, context)
        return [n - 1 for n in counts] if self.shape.layer_idx == 1 else counts

    monkeypatch.setattr(cluster, "declared", declared)
    assert run("--method", "snapkv", "--max_capacity_prompts", 32) == 1
    row = run.rows()[0]
    assert set(row) == {"_id", "dataset", "error"}
    assert "hotpotqa/hotpotqa-0, layer 1: SnapKV: 128 slots are stored and 124 to 124 declared" in row["error"]


# --- errors --------------------------------------------------------------------------------------------------------


class Watch:
    """Sees every prompt that SnapKV compresses, and does something at one of them."""

    def __init__(self, monkeypatch, at, action):
        self.seen = []
        cluster = METHODS.get("snapkv")
        real = cluster.compress

        def compress(layer, q, k, v, context):
            if layer.shape.layer_idx == 0:
                self.seen.append(context.example_id)
                if context.example_id == at and self.seen.count(at) == 1:
                    action()
            return real(layer, q, k, v, context)

        monkeypatch.setattr(cluster, "compress", compress)


def fail_at(monkeypatch, at, error):
    """The first attempt at example `at` raises."""

    def fail():
        raise error

    return Watch(monkeypatch, at, fail)


def test_a_failed_example_is_recorded_and_tried_again(run, monkeypatch, capsys):
    watch = fail_at(monkeypatch, "hotpotqa/hotpotqa-1", torch.OutOfMemoryError("no memory left"))
    assert run("--method", "snapkv") == 1
    assert len(watch.seen) == 5
    assert run.rows()[1] == {"_id": "hotpotqa-1", "dataset": "hotpotqa", "error": "OutOfMemoryError: no memory left"}
    assert run.record()["counts"]["hotpotqa"]["failed"] == 1 and run.record()["segments"][0]["exit"] == 1
    assert "failed: hotpotqa/hotpotqa-1: OutOfMemoryError" in capsys.readouterr().err
    assert "4 of 5" in summary(run.last)
    assert run("--method", "snapkv") == 0
    assert watch.seen[5:] == ["hotpotqa/hotpotqa-1"]
    assert [row["_id"] for row in run.rows()] == [f"hotpotqa-{i}" for i in range(3)]
    assert all("error" not in row for row in run.rows())


def test_fail_fast_stops_at_the_first(run, monkeypatch):
    watch = fail_at(monkeypatch, "hotpotqa/hotpotqa-1", ValueError("broken"))
    assert run("--method", "snapkv", "--fail_fast") == 1
    assert watch.seen == ["hotpotqa/hotpotqa-0", "hotpotqa/hotpotqa-1"]
    assert "error" in run.rows()[-1] and run.rows("trec") == []


def test_errors_as_zero_lowers_the_score_of_the_table(run, data, monkeypatch):
    fail_at(monkeypatch, "hotpotqa/hotpotqa-1", ValueError("broken"))
    run("--method", "snapkv")
    path = run.paths().results("hotpotqa")
    rows = [row | ({"pred": row["answers"][0], "score": 1.0} if "error" not in row else {}) for row in run.rows()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trec = run.paths().results("trec")
    rows = [row | {"pred": row["answers"][0], "score": 1.0} for row in run.rows("trec")]
    trec.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "100.00" in summary(run.last)
    assert "83.33" in summary(run.job("--method", "snapkv", "--errors_as_zero"))  # (2/3 + 1) / 2


def test_a_ratio_that_leaves_too_little_is_an_error_of_that_example(run, data):
    write_records(data, "hotpotqa", [make_record("hotpotqa", 0, 4), make_record("hotpotqa", 1, 120)])
    assert run("--method", "snapkv", "--max_capacity_prompts_ratio", "0.02") == 1
    rows = run.rows()
    assert "must be larger than the window" in rows[0]["error"] and "error" not in rows[1]
    assert run.paths().folder.name == "tiny_r0.02"
    assert rows[1]["kept_tokens"]["mean"] == round(rows[1]["prompt_tokens"] * 0.02)


# --- resume --------------------------------------------------------------------------------------------------------


def test_a_finished_run_loads_no_model(run, monkeypatch):
    assert run("--method", "snapkv") == 0
    before = run.paths().results("trec").read_bytes()
    monkeypatch.setattr("kvfactory.runner.load_model", lambda *a: pytest.fail("loaded the model"))
    assert run("--method", "snapkv") == 0
    assert run.paths().results("trec").read_bytes() == before
    with pytest.raises(BaseException, match="loaded the model"):
        run("--method", "snapkv", "--overwrite")


def test_more_examples_extend_a_file(run):
    run("--method", "snapkv", "--max_num_examples", 1)
    first = run.rows()
    run("--method", "snapkv")
    assert run.rows()[:1] == first and len(run.rows()) == 3


def test_a_stop_between_examples_and_going_on(run, monkeypatch):
    assert run("--method", "snapkv,h2o") == 0
    expected = [comparable(run.rows(d, n)) for n in (0, 1) for d in ("hotpotqa", "trec")]
    with StopSignal() as stop:
        watch = Watch(monkeypatch, "hotpotqa/hotpotqa-1", lambda: setattr(stop, "requested", True))
        job = run.job("--method", "snapkv,h2o", "--overwrite")
        assert execute(job, stop) == STOPPED
    assert watch.seen == ["hotpotqa/hotpotqa-0", "hotpotqa/hotpotqa-1"]  # this example is finished, no other begun
    assert [row["_id"] for row in run.rows()] == ["hotpotqa-0", "hotpotqa-1"] and run.rows("trec") == []
    assert run.record()["segments"][-1]["exit"] == STOPPED
    assert run("--method", "snapkv,h2o") == 0
    assert [comparable(run.rows(d, n)) for n in (0, 1) for d in ("hotpotqa", "trec")] == expected


def test_settings_that_change_are_refused_and_overwrite_replaces(run, data):
    run("--method", "snapkv", "--run_name", "mine")
    with pytest.raises(ValueError, match="method_settings.window_size: 8 on record, now 16"):
        run("--method", "snapkv", "--run_name", "mine", "--window_size", 16)
    assert run("--method", "snapkv", "--run_name", "mine", "--window_size", 16, "--overwrite") == 0
    write_dataset(data, "trec", 2, length=41)
    with pytest.raises(ValueError, match="trec.sha256"):
        run("--method", "snapkv", "--run_name", "mine", "--window_size", 16)


def test_another_model_of_the_same_name_is_refused(run, model, data, tmp_path):
    run("--method", "snapkv")
    other = save_checkpoint(tmp_path / "other" / "Tiny", initializer_range=0.2)
    again = Runner(other, data, run.save_dir)
    with pytest.raises(ValueError, match="model.weights_sha256"):
        again("--method", "snapkv")


def test_shards_and_merge_equal_one_run(model, data, tmp_path):
    whole = Runner(model, data, tmp_path / "whole")
    assert whole("--method", "snapkv,random") == 0
    parts = Runner(model, data, tmp_path / "parts")
    argv = ("--method", "snapkv,random", "--num_shards", 2)
    assert parts(*argv, "--shard_id", 1) == 0
    assert [row["_id"] for row in parts.rows()] == ["hotpotqa-1"]
    with pytest.raises(ValueError, match="shard 0 of 2"):
        merge(parts.job(*argv, "--merge_shards"))
    assert parts(*argv, "--shard_id", 0) == 0
    parts.last = parts.job(*argv, "--merge_shards")
    assert merge(parts.last) == 0
    for number in (0, 1):
        for dataset in ("hotpotqa", "trec"):
            assert comparable(parts.rows(dataset, number)) == comparable(whole.rows(dataset, number))
        assert parts.record(number)["settings"] == whole.record(number)["settings"]
        assert parts.record(number)["datasets"] == whole.record(number)["datasets"]
    assert not list((tmp_path / "parts").rglob("*shard*"))


# --- labels, notes, record -----------------------------------------------------------------------------------------


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
    recalled = [m for m in METHODS if any(
        f.metadata["paper"].mark == "recalled" for f in METHODS.get(m).Settings.__dataclass_fields__.values()
    )]  # fmt: skip
    if not recalled:
        pytest.skip("no preset value is recalled")
    run("--method", recalled[0], "--preset", "paper", "--max_capacity_prompts", 64)
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


def test_the_table_names_what_it_averages(run):
    run.common = run.common[: run.common.index("--max_new_tokens")]
    run("--method", "snapkv,fullkv", "--max_capacity_prompts", 32, "--kv_cache_granularity", "kv_head")
    text = summary(run.last)
    lines = text.splitlines()
    assert "| SnapKV+kv_head | kv_head" in lines[2] and "| FullKV+kv_head | -" in lines[3]
    assert len({len(line) for line in lines[:4]}) == 1
    assert "mean over 2 dataset(s): hotpotqa, trec" in text and f"--results_dir {run.paths().folder}" in text
    snap = [cell.strip() for cell in lines[2].split("|")]
    assert snap[3:6] == ["32", "2", "5"] and snap[7] == "32.0"


def test_randomised_methods_draw_anew_for_every_example(run, data):
    twins = [make_record("hotpotqa", 0) | {"_id": name} for name in ("a", "b")]
    write_records(data, "hotpotqa", twins)
    run("--method", "random,snapkv", "--max_capacity_prompts", 16)
    preds = [[row["pred"] for row in run.rows(number=number)] for number in (0, 1)]
    assert preds[0][0] != preds[0][1] and preds[1][0] == preds[1][1]
    run("--method", "random,snapkv", "--max_capacity_prompts", 16, "--seed", 7)
    assert run.rows()[0]["pred"] != preds[0][0] and run.rows(number=1)[0]["pred"] == preds[1][0]


def test_randomised_methods_do_not_depend_on_order_or_shard(run, model, data, tmp_path):
    run("--method", "random", "--max_capacity_prompts", 32)
    rows = {row["_id"]: row["pred"] for row in run.rows()}
    shard = ("--num_shards", 3, "--shard_id", 2)
    run("--method", "random", "--max_capacity_prompts", 32, *shard)
    assert not list(run.save_dir.rglob("*shard*"))  # the undivided run has everything
    part = Runner(model, data, tmp_path / "part")
    part("--method", "random", "--max_capacity_prompts", 32, *shard)
    assert [(row["_id"], row["pred"]) for row in part.rows()] == [("hotpotqa-2", rows["hotpotqa-2"])]


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
