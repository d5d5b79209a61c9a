"""Prompt texts: where they come from, what is refused, and our own wording."""

from __future__ import annotations

import json

import pytest

from kvfactory.data.longbench import read_dataset
from kvfactory.data.prompts import OFFICIAL_SHA256, PromptSet, content_sha256, load_prompts
from kvfactory.data.tasks import LONGBENCH_E, TASKS

NO_INPUT = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


@pytest.fixture(autouse=True)
def empty_places(tmp_path, monkeypatch):
    """No prompt file in the working directory or the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))


def put(folder, prompts, limits=None):
    config = folder / "config"
    config.mkdir(parents=True)
    (config / "dataset2prompt.json").write_text(json.dumps(prompts), encoding="utf-8")
    if limits is not None:
        (config / "dataset2maxlen.json").write_text(json.dumps(limits), encoding="utf-8")
    return folder


def test_places_are_tried_in_order(tmp_path):
    put(tmp_path / "cache" / "LongBench", {"lcc": "cache {context}"}, {"lcc": 64})
    found = load_prompts(tmp_path / "own", ["lcc"])
    assert (found.source, found.texts["lcc"]) == ("longbench", "cache {context}")
    put(tmp_path / "data" / "LongBench", {"lcc": "default {context}"})
    assert load_prompts(None, ["lcc"]).texts["lcc"] == "default {context}"
    assert load_prompts(tmp_path / "own", ["lcc"]).texts["lcc"] == "cache {context}"
    put(tmp_path / "own", {"lcc": "own {context}"})
    found = load_prompts(tmp_path / "own", ["lcc_e"])
    assert found.texts["lcc"] == "own {context}"
    assert found.path == tmp_path / "own" / "config" / "dataset2prompt.json"
    assert found.sha256 == content_sha256({"lcc": "own {context}"})
    assert not found.official


def test_without_files_the_wording_is_ours_and_says_so():
    found = load_prompts(None, [*TASKS, *LONGBENCH_E])
    assert (found.source, found.path, found.official) == ("kvfactory", None, False)
    assert set(found.texts) == set(TASKS)


@pytest.mark.parametrize("name", list(TASKS))
def test_our_wording_keeps_the_structure(name, record):
    text = load_prompts(None, [name]).render(name, {**record, "context": "CONTEXT", "input": "INPUT"})
    assert text.count("CONTEXT") == 1
    assert text.count("INPUT") == (name not in NO_INPUT)
    task = TASKS[name]
    if task.category == "few_shot":  # the record's input is the cue
        assert text.endswith("INPUT")
    elif task.category == "code":  # nothing between the unfinished code and the cue
        code = "CONTEXTINPUT" if name == "repobench-p" else "CONTEXT"
        assert text.endswith(f"\n{code}The following line is:\n")
    else:
        assert text.endswith(("Answer:", "Summary:", "：", ": "))
    assert any("\u4e00" <= c <= "\u9fff" for c in text) == (task.language == "zh")
    assert text.isascii() or task.language == "zh"


def test_render_fills_fields_once_and_strips_nothing(record):
    prompts = PromptSet({"hotpotqa": " {context}|{input}: \n"}, "longbench", "")
    assert prompts.render("hotpotqa_e", record) == " A text with {braces} and {input}.|Who wrote it?: \n"


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ({"trec": "{context}"}, "no prompt for dataset lcc; it has trec"),
        ({"lcc": "{context}{answers}"}, "placeholder {answers}"),
        ({"lcc": "{context}{input!r}"}, "placeholder {input}"),
        ({"lcc": "{context:>9}"}, "placeholder {context}"),
        ({"lcc": "{context.x}"}, "placeholder {context.x}"),
        ({"lcc": "{context}{}"}, "placeholder {}"),
        ({"lcc": "{context} {"}, "not a str.format template"),
        ({"lcc": "next line"}, "no {context}"),
        ({"lcc": 3}, "must be a string"),
        (["lcc"], "one JSON object"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path, prompts, says):
    put(tmp_path / "own", prompts)
    with pytest.raises(ValueError) as error:
        load_prompts(tmp_path / "own", ["lcc"])
    assert says in str(error.value)
    assert "dataset2prompt.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_broken_json_and_foreign_limits_are_refused(tmp_path):
    put(tmp_path / "a", {"lcc": "{context}"}, {"lcc": 128})
    with pytest.raises(ValueError, match="dataset2maxlen.json gives lcc 128 new tokens.* 64"):
        load_prompts(tmp_path / "a", ["lcc"])
    put(tmp_path / "b", {"lcc": "{context}"}, {})
    with pytest.raises(ValueError, match="gives lcc None"):
        load_prompts(tmp_path / "b", ["lcc"])
    (tmp_path / "b" / "config" / "dataset2prompt.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        load_prompts(tmp_path / "b", ["lcc"])


def test_the_hash_ignores_how_the_file_is_written():
    text = '{ "b": "\\u00e9",\n "a": 1 }'
    assert content_sha256(json.loads(text)) == content_sha256({"a": 1, "b": "\u00e9"})
    assert content_sha256({"a": 2}) != content_sha256({"a": 1})


def test_official_prompts_fill_every_real_record(data_dir):
    folder = data_dir / "LongBench"
    prompts = load_prompts(folder, [*TASKS, *LONGBENCH_E])
    assert prompts.source == "longbench"
    assert prompts.official
    assert prompts.sha256 == OFFICIAL_SHA256["dataset2prompt.json"]
    assert (
        content_sha256(json.loads((folder / "config" / "dataset2maxlen.json").read_text()))
        == OFFICIAL_SHA256["dataset2maxlen.json"]
    )
    rendered = 0
    for name in TASKS:
        for record in read_dataset(folder / f"{name}.jsonl", name):
            text = prompts.render(name, record)
            assert text == prompts.texts[name].format(**record)
            assert record["context"] in text
            assert (record["input"] in text) or name in NO_INPUT
            rendered += 1
    assert rendered == 163


def test_our_wording_is_not_a_copy(data_dir):
    """No sentence of 20 characters or more is shared with the official texts."""
    official = load_prompts(data_dir / "LongBench", TASKS).texts
    ours = load_prompts(None, TASKS).texts
    for name in TASKS:
        sentences = official[name].replace("\n", ". ").replace("。", ". ").split(". ")
        assert not [s for s in sentences if len(s.strip()) >= 20 and s.strip() in ours[name]], name
