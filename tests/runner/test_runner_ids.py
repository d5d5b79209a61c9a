"""--ids: which examples run, in what order the subset flags apply, and what tells such a run from others."""

from __future__ import annotations

import hashlib
import json

import pytest
from tiny_checkpoint import make_record, write_dataset, write_records

import run_needle_in_haystack
import run_ruler
from kvfactory import cli
from kvfactory.data.subset_ids import read_ids
from kvfactory.preparation import prepare
from kvfactory.reports.eval_files import find_runs
from kvfactory.reports.eval_tables import score_run
from kvfactory.reports.stop import StopSignal
from kvfactory.runner import execute, merge
from kvfactory.suites.needle import NeedleSettings
from kvfactory.suites.ruler import RulerSettings


@pytest.fixture
def listed(tmp_path):
    def write(text, name="ids.txt"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def chosen(job):
    return {name: list(order) for name, order in job.orders.items()}


# --- the file ------------------------------------------------------------------------------------------------------


def test_blanks_and_line_ends_are_ignored(listed):
    ids = read_ids(listed(b"\xef\xbb\xbf b \r\n\r\n\ta\xc3\xa9\n  \nc d"))
    assert ids.lines == {"b": 1, "a\u00e9": 3, "c d": 5}
    assert ids.sha256 == read_ids(listed("c d\na\u00e9\nb\n", "other.txt")).sha256
    assert ids.sha256 == hashlib.sha256("a\u00e9\nb\nc d".encode()).hexdigest()
    assert ids.sha256 != read_ids(listed("c d\nb\n")).sha256


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "ids.txt is empty"),
        (" \n\r\n\t\n", "ids.txt is empty"),
        ("a\nb\n\n a \n", "ids.txt, line 4: _id 'a' stands on line 1 already"),
        (b"a\nb\n\xff\n", "ids.txt, line 3: not UTF-8"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(listed, content, says):
    with pytest.raises(ValueError, match=says):
        read_ids(listed(content))


def test_paths_that_are_no_file_are_refused(run, tmp_path):
    with pytest.raises(ValueError, match="--ids .*nowhere.* cannot be read .No such file"):
        run.job("--method", "snapkv", "--ids", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="--ids ~nobody-here/ids cannot be read"):
        run.job("--method", "snapkv", "--ids", "~nobody-here/ids")
    with pytest.raises(ValueError, match="cannot be read .Is a directory"):
        run.job("--method", "snapkv", "--ids", tmp_path)
    with pytest.raises(ValueError, match="--ids is empty"):
        run.job("--method", "snapkv", "--ids", "")


def test_an_id_of_no_selected_dataset_is_refused_by_line(run, listed):
    listed("trec-1\n\nhotpotqa-7\nqasper-0\n")
    with pytest.raises(ValueError) as error:
        run.job("--method", "snapkv", "--ids", run.save_dir.parent / "ids.txt")
    assert "ids.txt, line 3: _id 'hotpotqa-7' is in none of the selected datasets (hotpotqa, trec)" in str(error.value)
    assert "(nor are 1 further ones of the file)" in str(error.value)
    assert not run.save_dir.exists()


# --- which examples ------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_a_whole_run_in_data_order(run, listed):
    assert run("--method", "snapkv") == 0
    whole, all_of_them = {name: run.rows(name) for name in ("hotpotqa", "trec")}, run.paths().label
    assert run("--method", "snapkv", "--ids", listed("trec-1\nhotpotqa-2\nhotpotqa-0\n")) == 0
    assert [row["_id"] for row in run.rows()] == ["hotpotqa-0", "hotpotqa-2"]
    assert [row["pred"] for row in run.rows()] == [whole["hotpotqa"][i]["pred"] for i in (0, 2)]
    assert [row["pred"] for row in run.rows("trec")] == [whole["trec"][1]["pred"]]
    # the table counts them as those of --max_num_examples
    (table,) = map(score_run, find_runs(run.save_dir))
    label = run.paths().label
    assert {r.label: [c.n for c in r.cells.values()] for r in table.rows} == {all_of_them: [3, 2], label: [2, 1]}
    assert any("hotpotqa 2 of 200, trec 1 of 200" in line for line in table.captions())


def test_a_dataset_without_a_listed_example_is_left_out_with_a_note(run, listed, capsys):
    path = listed("hotpotqa-1")
    assert run("--method", "snapkv", "--ids", path) == 0
    assert list(run.last.parts) == ["hotpotqa"]
    note = f"--ids {path} names no example of trec: nothing is run there"
    assert f"note: {note}" in capsys.readouterr().err and note in run.record()["notes"]
    assert run.record()["datasets"]["hotpotqa"]["examples"] == 1 and "trec" not in run.record()["datasets"]
    assert not (run.paths().folder / "trec").exists()


def test_the_subset_flags_apply_one_after_the_other(run, data, listed):
    write_dataset(data, "hotpotqa", 12)
    ids = [f"hotpotqa-{i}" for i in (1, 3, 4, 6, 8, 9, 11)]
    flags = ("--method", "snapkv", "--ids", listed("\n".join(reversed(ids))))
    assert chosen(run.job(*flags))["hotpotqa"] == ids
    assert chosen(run.job(*flags, "--max_num_examples", 3))["hotpotqa"] == ids[:3]
    drawn = chosen(run.job(*flags, "--max_num_examples", 5, "--sample_method", "random"))["hotpotqa"]
    assert len(drawn) == 5 and set(drawn) < set(ids) and drawn == sorted(drawn, key=ids.index) and drawn != ids[:5]
    shards = [run.job(*flags, "--max_num_examples", 5, "--num_shards", 2, "--shard_id", k) for k in (0, 1)]
    assert [chosen(job)["hotpotqa"] for job in shards] == [ids[:5][0::2], ids[:5][1::2]]


def test_shards_of_a_list_are_joined(run, listed):
    flags = ("--method", "snapkv", "--ids", listed("hotpotqa-2\nhotpotqa-0\ntrec-0"), "--num_shards", 2)
    for k in (1, 0):
        assert run(*flags, "--shard_id", k) == 0
    run.last = run.job(*flags, "--merge_shards")
    assert merge(run.last) == 0
    assert [row["_id"] for row in run.rows()] == ["hotpotqa-0", "hotpotqa-2"] and len(run.rows("trec")) == 1


def test_shards_without_examples_leave_the_joined_counters_whole(run, listed):
    flags = ("--method", "snapkv", "--ids", listed("hotpotqa-2\nhotpotqa-0\ntrec-0"), "--num_shards", 3)
    for k in range(3):
        assert run(*flags, "--shard_id", k) == 0
    assert not run.paths().meta.exists()
    run.last = run.job(*flags, "--merge_shards")
    assert merge(run.last) == 0
    assert {name: counts["done"] for name, counts in run.record()["counts"].items()} == {"hotpotqa": 2, "trec": 1}


def test_one_id_in_two_datasets_names_both_examples(run, data, listed):
    for name in ("hotpotqa", "trec"):
        write_records(data, name, [make_record(name, i) | {"_id": str(i)} for i in range(3)])
    assert chosen(run.job("--method", "snapkv", "--ids", listed("2"))) == {"hotpotqa": ["2"], "trec": ["2"]}


# --- identity ------------------------------------------------------------------------------------------------------


def test_label_and_record_follow_the_set_of_ids(run, listed):
    def planned(text, name):
        (found,) = run.job("--method", "snapkv", "--ids", listed(text, name)).runs
        return found.paths.label, found.settings["ids"]

    label, record = planned("hotpotqa-0\ntrec-1", "a")
    assert label.startswith("SnapKV+h") and len(label) == len("SnapKV+h") + 6
    assert record == {"count": 2, "sha256": read_ids(run.save_dir.parent / "a").sha256}
    assert planned("\ntrec-1 \r\nhotpotqa-0\n", "b") == (label, record)
    assert planned("hotpotqa-0", "c")[0] != label
    (plain,) = run.job("--method", "snapkv").runs
    assert "ids" not in plain.settings and plain.paths.label != label
    run.common = run.common[: run.common.index("--max_new_tokens")]
    assert planned("hotpotqa-0", "c")[0].startswith("SnapKV+h")
    assert run.job("--method", "snapkv").runs[0].paths.label == "SnapKV"


def test_another_list_under_one_run_name_is_refused(run, listed):
    flags = ("--method", "snapkv", "--run_name", "mine", "--ids")
    assert run(*flags, listed("hotpotqa-0")) == 0
    with pytest.raises(ValueError, match="ids.count: 1 on record, now 2; ids.sha256"):
        run(*flags, listed("hotpotqa-0\nhotpotqa-1"))
    assert run(*flags, listed("hotpotqa-0\nhotpotqa-1"), "--resume", "force") == 0
    with pytest.raises(ValueError, match="hotpotqa-1', which is not among this run's 1 examples"):  # rows stay checked
        run(*flags, listed("hotpotqa-0"), "--resume", "force")


# --- the other runners ---------------------------------------------------------------------------------------------


@pytest.fixture
def needle(model, tmp_path):
    def argv(*more):
        common = ["--model_path", model, "--method", "streamingllm", "--device", "cpu", "--max_new_tokens", 4]
        common += ["--max_capacity_prompts", 32, "--save_dir", tmp_path / "out", "--quiet"]
        return [str(part) for part in (*common, *more)]

    return argv


def test_the_needle_runs_listed_cells(needle, listed, tmp_path):
    grid = ("--s_len", 1200, "--e_len", 1400, "--step", 200, "--depths", "0,50,100")
    job = prepare(*cli.parse(needle(*grid), NeedleSettings))
    cells = chosen(job)["needle"]
    assert len(cells) == 6
    assert run_needle_in_haystack.main(needle(*grid, "--ids", listed(f"{cells[4]}\n{cells[2]}"))) == 0
    (file,) = (tmp_path / "out").rglob("needle/*.json")
    assert [json.loads(line)["_id"] for line in file.read_text().splitlines()] == [cells[2], cells[4]]
    with pytest.raises(ValueError, match="line 1: _id 'len9_depth0' is in none of the selected datasets .needle"):
        prepare(*cli.parse(needle(*grid, "--ids", listed("len9_depth0")), NeedleSettings))


def ruler_file(folder, task, indexes):
    path = folder / "512" / f"{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"input": "words " * 20, "outputs": ["7"], "answer_prefix": " it is", "length": 200}
    path.write_text("".join(json.dumps(record | {"index": i}) + "\n" for i in indexes))


def test_ruler_reads_listed_indexes_of_every_task(needle, listed, tmp_path):
    ruler_file(tmp_path / "data", "vt", [0, 3, 5])
    ruler_file(tmp_path / "data", "cwe", [0, 1])
    flags = ("--data_dir", tmp_path / "data", "--lengths", 512, "--tasks", "vt,cwe", "--ids")
    with StopSignal() as stop:
        job = prepare(*cli.parse(needle(*flags, listed("5\n3")), RulerSettings))
        assert chosen(job) == {"512/vt": ["3", "5"]} and execute(job, stop) == 0
    assert chosen(prepare(*cli.parse(needle(*flags, listed("0\n1")), RulerSettings))) == {
        "512/vt": ["0"],
        "512/cwe": ["0", "1"],
    }
    with pytest.raises(ValueError, match=r"line 2: _id '4' is in none of the selected datasets \(512/vt, 512/cwe\)"):
        prepare(*cli.parse(needle(*flags, listed("3\n4")), RulerSettings))


def test_ruler_generates_no_more_than_the_listed_samples_need(needle, listed, tmp_path, capsys):
    flags = ("--lengths", 1024, "--tasks", "niah_single_1", "--ids")
    arguments = [a for a in needle(*flags, listed("1\n3")) if a != "--quiet"]
    job = prepare(*cli.parse(arguments, RulerSettings))
    assert chosen(job) == {"1024/niah_single_1": ["1", "3"]}
    assert "generating 4 samples" in capsys.readouterr().err
    all_four = prepare(
        *cli.parse(needle("--lengths", 1024, "--tasks", "niah_single_1", "--num_samples", 4), RulerSettings)
    )
    picked = job.parts["1024/niah_single_1"].share
    assert picked == [all_four.parts["1024/niah_single_1"].share[i] for i in (1, 3)]
    for wrong in ("500", "01", "x"):
        with pytest.raises(ValueError, match=f"line 1: _id '{wrong}' is in none"):
            prepare(*cli.parse(needle(*flags, listed(wrong)), RulerSettings))
    assert run_ruler.main(needle(*flags, listed("7"), "--num_samples", 5)) == 2


def test_a_list_that_leaves_out_what_is_recorded_is_named(run, listed):
    flags = ("--method", "snapkv", "--run_name", "x")
    assert run(*flags, "--ids", listed("hotpotqa-1\nhotpotqa-2\ntrec-1\n")) == 0
    shorter = listed("hotpotqa-1\ntrec-1\n", "shorter.txt")
    with pytest.raises(
        ValueError, match="_id 'hotpotqa-2', .* run with the data, the --ids and the --max_num_examples"
    ):
        run(*flags, "--ids", shorter)
    one = listed("hotpotqa-1\nhotpotqa-2\n", "one.txt")
    for force in (("--overwrite",), ("--resume", "force")):
        with pytest.raises(
            ValueError, match="trec .*: add them to --datasets and examples of theirs to the file of --ids"
        ):
            run(*flags, "--ids", one, *force)
        with pytest.raises(ValueError, match="trec .*: add them to --datasets, or choose another --run_name"):
            run(*flags, "--datasets", "hotpotqa", *force)
