"""--hf_dataset: `datasets` on local folders, and a file server that speaks the hub's addresses."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from calls import refused_early, rows, typed
from local_http import serve
from tiny_checkpoint import make_record, save_checkpoint, write_dataset

import run_longbench
from kvfactory.data.hub_dataset import HubDataset, open_hub_dataset, read_hub_dataset
from kvfactory.data.json_lines import kind
from kvfactory.data.longbench import FIELDS, locate_data, read_dataset
from kvfactory.data.own_prompts import OWN_PROMPTS
from kvfactory.data.prompts import OFFICIAL_HEADS, PromptSet, content_sha256, load_prompts
from kvfactory.data.tasks import TASKS

OWN = PromptSet(dict(OWN_PROMPTS), "kvfactory", "x")
COMMIT = "c0ffee" + "0" * 34


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)


def records_of(name, count=3):
    return [make_record(name, i) for i in range(count)]


def write_folder(folder: Path, configs: dict[str, list[dict]], split="test", per_file=2) -> Path:
    """A data set as the hub has it: parquet files per config, and which is which in README.md."""
    head = "---\nconfigs:\n"
    for name, records in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        parts = [records[i : i + per_file] for i in range(0, len(records), per_file)] or [[]]
        for number, part in enumerate(parts):
            path = folder / name / f"{split}-{number:05}-of-{len(parts):05}.parquet"
            pq.write_table(pa.Table.from_pylist(part), path)
        head += f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}/{split}-*\n"
    (folder / "README.md").write_text(head + "---\n# Records\n")
    return folder


def read(folder, name="trec", prompts=OWN):
    return read_hub_dataset(open_hub_dataset(str(folder)), name, prompts)


def message(call, *args):
    with pytest.raises(ValueError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- local folders -------------------------------------------------------------------------------------------------


def test_records_are_those_that_were_written(tmp_path):
    classes = records_of("trec", 5)
    none = records_of("hotpotqa_e")
    folder = write_folder(tmp_path / "mine", {"trec": classes, "hotpotqa_e": none})
    assert read(folder) == classes and read(folder, "hotpotqa_e") == none
    assert open_hub_dataset(str(folder)) == HubDataset(str(folder), None, None, folder)
    assert not list(tmp_path.rglob("*.arrow"))  # nothing is converted into a cache


def test_further_columns_are_dropped_and_json_lines_are_read_too(tmp_path):
    given = records_of("trec")
    folder = write_folder(tmp_path / "mine", {"trec": [r | {"more": 1} for r in given]})
    assert read(folder) == given
    for path in (folder / "trec").iterdir():
        path.unlink()
    (folder / "trec" / "test-0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in given))
    assert read(folder) == given


def test_the_only_split_is_taken_whatever_its_name(tmp_path):
    given = records_of("trec")
    assert read(write_folder(tmp_path / "one", {"trec": given}, split="train")) == given
    folder = write_folder(tmp_path / "two", {"trec": given}, split="train")
    text = (folder / "README.md").read_text()
    more = "  - split: dev\n    path: trec/train-00000*\n"
    (folder / "README.md").write_text(text.replace("---\n# R", more + "---\n# R"))
    assert "trec: several splits (train, dev), none of them test" in message(read, folder)
    (folder / "README.md").write_text(text.replace("---\n# R", more.replace("dev", "test") + "---\n# R"))
    assert read(folder) == given[:2]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_needed(tmp_path, field):
    folder = write_folder(
        tmp_path / "mine", {"trec": [{k: v for k, v in r.items() if k != field} for r in records_of("trec")]}
    )
    assert f"mine, trec, row 1: no {field} among its columns (" in message(read, folder)


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("length", 2.5, "row 1: length must be an integer, this is a number with a fraction"),
        ("answers", "one", "row 1: answers must be a list of strings, this is a string"),
        ("context", None, "row 1: context must be a string, this is null"),
        ("input", b"abc", "row 1: input must be a string, this is bytes"),
        ("_id", "same", "row 2: _id 'same' is already used in row 1"),
    ],
)
def test_fields_of_another_kind_are_refused_by_row(tmp_path, field, value, says):
    folder = write_folder(tmp_path / "mine", {"trec": [r | {field: value} for r in records_of("trec")]})
    assert says in message(read, folder)


def test_a_copy_whose_questions_were_moved_is_refused(tmp_path):
    """The columns of Xnhyacinth/LongBench."""
    kept = [
        {k: v for k, v in r.items() if k != "input"} | {"question": "q", "answer_prefix": ""}
        for r in records_of("trec")
    ]
    assert "no input among its columns" in message(read, write_folder(tmp_path / "mine", {"trec": kept}))


@pytest.mark.parametrize("name", TASKS)
def test_contexts_that_are_prompts_already_are_refused(name, data_dir):
    """In LongBench's wording, whatever wording is in use, and in the wording in use."""
    official = load_prompts(data_dir / "LongBench", [name])
    assert official.official and OFFICIAL_HEADS[name]
    for made, used in ((official, official), (official, OWN), (OWN, OWN)):
        head = made.texts[name].split("{context}")[0]
        assert used.begins(name, head + "text") and used.begins(name, "\n " + head.strip())
        assert (
            not used.begins(name, "text" + head) and not used.begins(name, "") and not used.begins(name, "Passage 1:")
        )
        assert not used.begins(name, head.lstrip()[:10])


def test_no_record_of_the_sample_suite_looks_like_a_prompt():
    folder = Path(__file__).parents[2] / "data" / "sample"
    for path in folder.glob("*.jsonl"):
        assert not any(OWN.begins(path.stem, record["context"]) for record in read_dataset(path, path.stem))


def test_a_prompt_as_context_is_refused_by_row(tmp_path):
    given = records_of("trec")
    given[2]["context"] = OWN_PROMPTS["trec"].format(context=given[2]["context"], input="")
    assert "row 3: context begins with the prompt itself ('Each question" in message(
        read, write_folder(tmp_path / "mine", {"trec": given})
    )
    wordless = PromptSet(
        {"trec": "{context} {input}"}, "longbench", "x"
    )  # begins with nothing, so nothing is told by it
    assert read(tmp_path / "mine", prompts=wordless) == given


def test_what_is_no_data_set_of_longbench_is_refused(tmp_path, caplog):
    folder = write_folder(tmp_path / "mine", {"trec": records_of("trec"), "lcc": []})
    assert "has no config qasper, only trec, lcc; each set" in message(read, folder, "qasper")
    assert "mine, lcc cannot be read (" in message(read, folder, "lcc")  # no parquet reader takes a file without rows
    lines = write_folder(tmp_path / "lines", {"trec": []})
    (lines / "trec" / "test-00000-of-00001.parquet").unlink()
    (lines / "trec" / "test-0.jsonl").write_text("\n\n")
    assert "lines, trec: no rows" in message(read, lines)
    (folder / "trec" / "test-00001-of-00002.parquet").write_bytes(b"PAR1 no more")
    assert "mine, trec cannot be read (" in message(read, folder)
    assert caplog.records == []  # no word of the library besides
    (tmp_path / "empty").mkdir()
    assert "empty cannot be read as a data set (" in message(read, tmp_path / "empty")
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    assert "cannot be read as a data set (" in message(read, folder)


def test_a_loading_script_is_refused_and_not_run(tmp_path):
    folder = write_folder(tmp_path / "mine", {"trec": records_of("trec")})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "holds the loading script mine.py, and none is run" in message(open_hub_dataset, str(folder))
    for name in ("THUDM/LongBench", "zai-org/longbench@main"):
        assert "`python -m kvfactory.data download` fetches its records" in message(open_hub_dataset, name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/x", "~nowhere", "a/b/c"])
def test_paths_that_are_not_there_never_reach_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert f"--hf_dataset {name} does not exist: give a hub id" in message(open_hub_dataset, name)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file: give a hub id" in message(open_hub_dataset, str(tmp_path / "file"))


# --- the hub -------------------------------------------------------------------------------------------------------


class Hub:
    """Serves `folder` as the data set org/LB at `COMMIT`, the head of main."""

    def __init__(self, folder: Path):
        self.asked: list[str] = []
        outer = self

        def reply(request, send_body: bool):
            outer.asked.append(request.path)
            path = request.path.partition("?")[0]
            files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
            body, at = None, f"/datasets/org/LB/resolve/{COMMIT}/"
            if path in (f"/api/datasets/org/LB/revision/{r}" for r in ("main", COMMIT, "v1")):
                listed = {"id": "org/LB", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                body = json.dumps(listed).encode()
            elif path.startswith(f"/api/datasets/org/LB/tree/{COMMIT}"):
                tree = [{"type": "file", "path": n, "oid": "0", "size": p.stat().st_size} for n, p in files.items()]
                body = json.dumps(tree).encode()
            elif path.removeprefix(at) in files:
                body = files[path.removeprefix(at)].read_bytes()
            request.send_response(404 if body is None else 200)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(body or b"")))
            request.send_header("ETag", f'"{hashlib.sha1(path.encode()).hexdigest()}"')
            request.send_header("X-Repo-Commit", COMMIT)
            request.end_headers()
            if send_body:
                request.wfile.write(body or b"")

        self.http, self.url = serve(reply)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    running = Hub(tmp_path / "served")
    there = functools.partial(huggingface_hub.snapshot_download, endpoint=running.url, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", there)
    yield running
    running.http.shutdown()
    running.http.server_close()


def test_files_are_fetched_once_and_read_at_their_commit(hub, tmp_path):
    given = {"trec": records_of("trec", 5), "lcc": records_of("lcc")}
    write_folder(tmp_path / "served", given)
    source = open_hub_dataset("org/LB")
    assert (source.id, source.revision, source.given) == ("org/LB", COMMIT, "org/LB")
    assert {name: read_hub_dataset(source, name, OWN) for name in given} == given
    assert any("/resolve/" in path for path in hub.asked)
    del hub.asked[:]
    for name in ("org/LB", f"org/LB@{COMMIT}", "org/LB@v1"):
        again = open_hub_dataset(name)
        assert (again.id, again.revision, again.folder) == ("org/LB", COMMIT, source.folder)
    assert not any("/resolve/" in path for path in hub.asked)
    hub.http.shutdown()
    hub.http.server_close()
    assert open_hub_dataset("org/LB") == source  # what is there needs no network


def test_a_script_on_the_hub_is_refused(hub, tmp_path):
    write_folder(tmp_path / "served", {"trec": records_of("trec")})
    (tmp_path / "served" / "LB.py").write_text("raise SystemExit('run')")
    assert "--hf_dataset org/LB holds the loading script LB.py" in message(open_hub_dataset, "org/LB")


@pytest.mark.parametrize("name", ["org/other", "org/LB@no-such-tag", "not an id!"])
def test_what_the_hub_does_not_have_is_one_sentence(hub, tmp_path, name):
    write_folder(tmp_path / "served", {"trec": records_of("trec")})
    assert f"--hf_dataset {name} is no local folder and could not be had from the hub (" in message(
        open_hub_dataset, name
    )


def test_without_a_network_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    there = functools.partial(huggingface_hub.snapshot_download, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", there)
    said = message(open_hub_dataset, "org/LB")
    assert "could not be had from the hub (LocalEntryNotFoundError" in said and "or give a local folder" in said


# --- the runner ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def argv(model, tmp_path):
    flags = {"method": "streamingllm", "model_path": model, "datasets": "hotpotqa,trec", "max_capacity_prompts": 32}
    return flags | {"device": "cpu", "max_new_tokens": 4, "quiet": None, "save_dir": tmp_path / "out"}


def test_rows_are_those_of_the_files_and_the_record_says_what_was_read(hub, argv, tmp_path, capsys):
    names = ("hotpotqa", "trec")
    for name in names:
        write_dataset(tmp_path / "data", name, 3)
    given = {name: read_dataset(path, name) for name, path in locate_data(tmp_path / "data", names).items()}
    write_folder(tmp_path / "served", given)
    assert run_longbench.main(typed(argv | {"data_dir": tmp_path / "data", "save_dir": tmp_path / "files"})) == 0
    assert run_longbench.main(typed(argv | {"hf_dataset": "org/LB"})) == 0
    assert rows(tmp_path / "out") == rows(tmp_path / "files")  # under the same label, too
    (meta,) = (tmp_path / "out").rglob("meta/*.json")
    facts = json.loads(meta.read_text())["datasets"]
    for name in names:
        assert facts[name]["hf_dataset"] == {"id": "org/LB", "revision": COMMIT}
        assert facts[name]["sha256"] == content_sha256(given[name]) and facts[name]["rows"] == 3
    # the same records in other files are other data for a run that goes on, since nothing says that they are the same
    capsys.readouterr()
    assert run_longbench.main(typed(argv | {"data_dir": tmp_path / "data"})) == 2
    assert "hotpotqa.sha256" in capsys.readouterr().err


def test_other_flags_take_from_its_records(argv, tmp_path):
    folder = write_folder(tmp_path / "mine", {name: records_of(name, 4) for name in ("hotpotqa", "trec")})
    (tmp_path / "ids").write_text("hotpotqa-3\nhotpotqa-1\ntrec-0\ntrec-2\n")
    more = {"hf_dataset": folder, "ids": tmp_path / "ids", "max_num_examples": 1}
    assert run_longbench.main(typed(argv | more)) == 0
    (found,) = {tuple(row["_id"] for rows_ in rows(tmp_path / "out").values() for row in rows_)}
    assert found == ("hotpotqa-1", "trec-0")


def test_a_folder_under_another_name_goes_on_and_other_records_do_not(argv, tmp_path, capsys):
    sets = {name: records_of(name) for name in ("hotpotqa", "trec")}
    folder = write_folder(tmp_path / "mine", sets)
    assert run_longbench.main(typed(argv | {"hf_dataset": folder, "max_num_examples": 1})) == 0
    moved = folder.rename(tmp_path / "moved")
    assert run_longbench.main(typed(argv | {"hf_dataset": moved, "max_num_examples": 2})) == 0
    (meta,) = (tmp_path / "out").rglob("meta/*.json")
    found = json.loads(meta.read_text())["datasets"]
    assert {name: facts["sha256"] for name, facts in found.items()} == {n: content_sha256(r) for n, r in sets.items()}
    other = write_folder(tmp_path / "mine", sets | {"trec": records_of("trec", 4)})
    capsys.readouterr()
    assert run_longbench.main(typed(argv | {"hf_dataset": other})) == 2
    error = capsys.readouterr().err
    assert "trec.sha256" in error and "hotpotqa." not in error


def test_refusals_come_before_the_model(argv, tmp_path, capsys, monkeypatch):
    folder = write_folder(tmp_path / "mine", {"hotpotqa": records_of("hotpotqa")})
    for more, says in (
        ({"hf_dataset": folder}, "has no config trec"),
        ({"hf_dataset": folder, "data_dir": tmp_path}, "both give the records: leave one out"),
        ({"hf_dataset": ""}, "--hf_dataset is empty"),
        ({"hf_dataset": "/nowhere"}, "/nowhere does not exist"),
    ):
        assert says in refused_early(capsys, run_longbench.main, typed(argv | more), monkeypatch, tmp_path / "out")


def test_kinds_that_json_has_not_are_called_by_their_type():
    assert kind(b"") == "bytes" and kind(1) == "an integer"
