"""The bundled sample suite: the committed files are the script's, and their answers are right.

The answers are checked from the text alone, by reading it as a user would; nothing here imports the generators.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvfactory.data.tasks import DEFAULT_DATASETS, get_task
from kvfactory.metrics import score_example

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data" / "sample"
SCRIPT = ROOT / "scripts" / "make_sample_data.py"
DATASETS = (*DEFAULT_DATASETS, "multifieldqa_zh", "passage_retrieval_zh")
FIELDS = ["input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"]
SINGLE_DOC = ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh")
MULTI_DOC = ("hotpotqa", "2wikimqa", "musique")
SUMMARIES = ("gov_report", "multi_news", "qmsum", "samsum")


def read(dataset: str) -> list[dict]:
    with open(SAMPLE / f"{dataset}.jsonl", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def all_records() -> list[dict]:
    return [record for dataset in DATASETS for record in read(dataset)]


def of(*datasets: str) -> list:
    """Test parameters: every record of the datasets under a readable id."""
    return [pytest.param(r, id=f"{d}-{i}") for d in datasets for i, r in enumerate(read(d))]


def occurrences(needle: str, text: str) -> int:
    """How often the text holds the needle as whole words (a number is not part of a longer one)."""
    if not needle.isascii():
        return text.count(needle)
    return len(re.findall(rf"(?<![\w.,])(?<![\d]-){re.escape(needle)}(?![\w])(?![.,]\d)", text))


def make(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_committed_files_are_what_the_script_makes(tmp_path: Path) -> None:
    # another hash seed than the usual one would show a dependence on the order of a set
    assert make("--out", str(tmp_path), hash_seed="4711").returncode == 0
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in SAMPLE.glob("*.jsonl")}
    assert sorted(made) == sorted(f"{dataset}.jsonl" for dataset in DATASETS)


def test_check_names_what_is_stale(tmp_path: Path) -> None:
    assert make("--out", str(tmp_path)).returncode == 0
    assert make("--out", str(tmp_path), "--check").returncode == 0
    (tmp_path / "trec.jsonl").write_bytes((tmp_path / "trec.jsonl").read_bytes()[:-2])
    (tmp_path / "lcc.jsonl").unlink()
    (tmp_path / "other.jsonl").touch()
    result = make("--out", str(tmp_path), "--check")
    assert result.returncode == 1
    for name, reason in (("trec", "differs"), ("lcc", "missing"), ("other", "not part")):
        assert any(f"{name}.jsonl" in line and reason in line for line in result.stderr.splitlines())


def test_the_script_needs_nothing_but_the_standard_library() -> None:
    found = {"sample_data", *sys.stdlib_module_names}
    for path in (SCRIPT, *(ROOT / "scripts" / "sample_data").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= found, path
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in found, path


def test_suite_has_ninety_records_with_different_ids() -> None:
    records = all_records()
    assert len(records) == 90
    assert all(len(read(dataset)) == 5 for dataset in DATASETS)
    assert len({record["_id"] for record in records}) == 90
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) < 1_200_000


@pytest.mark.parametrize("record", of(*DATASETS))
def test_fields(record: dict) -> None:
    assert list(record) == FIELDS
    assert all(isinstance(record[key], str) for key in ("input", "context", "dataset", "language", "_id"))
    assert record["answers"] and all(isinstance(answer, str) and answer for answer in record["answers"])
    assert re.fullmatch(r"[0-9a-f]{40,48}", record["_id"])
    assert record["language"] == {"en": "en", "zh": "zh", "code": "python"}[get_task(record["dataset"]).language]
    texts = [record["context"], record["input"], *record["answers"]]
    if record["language"] == "zh":
        assert record["length"] == sum(map(len, texts))
    else:
        assert record["length"] == len(" ".join(texts).split())
    if record["dataset"] == "trec":
        assert record["answers"][0] in record["all_classes"]
    else:
        assert record["all_classes"] is None
    without_input = ("gov_report", "multi_news", "passage_count", "lcc")
    assert bool(record["input"]) == (record["dataset"] not in without_input)
    # nothing of the template language may be left over
    if record["language"] != "python":
        assert not re.search(r"[{}\[\]|]", record["context"] + record["input"] + "".join(record["answers"]))


@pytest.mark.parametrize("record", of(*DATASETS))
def test_metric_gives_the_right_answer_full_marks(record: dict) -> None:
    answers, classes = record["answers"], record["all_classes"]
    # ROUGE-L of two equal texts is 1 - 5e-9 by its definition
    assert score_example(record["dataset"], answers[0], answers, all_classes=classes) == pytest.approx(1.0, abs=1e-8)
    assert score_example(record["dataset"], "", answers, all_classes=classes) == 0.0


@pytest.mark.parametrize("record", of(*DATASETS))
def test_lengths_in_characters(record: dict) -> None:
    """700 to 3,000 tokens of the embedded model's tokenizer; here by its measured characters per token."""
    size = len(record["context"] + record["input"])
    # measured on the 90 records: English 3.0 to 4.4 characters per token, code 3.7 to 3.9, Chinese 0.56 to 0.59
    low, high = (390, 1770) if record["language"] == "zh" else (2500, 11500)
    assert low < size < high


@pytest.mark.parametrize("dataset", [d for d in DATASETS if d != "passage_count"])
def test_no_paragraph_comes_twice(dataset: str) -> None:
    for record in read(dataset):
        if record["language"] == "python":
            continue
        pieces = [piece for piece in re.split(r"\n\n|(?<=\n)(?=Passage)", record["context"]) if len(piece) > 60]
        assert len(pieces) == len(set(pieces))


@pytest.mark.parametrize("record", of(*SINGLE_DOC))
def test_single_document_answer_is_stated_once(record: dict) -> None:
    assert occurrences(record["answers"][0], record["context"]) == 1
    assert record["answers"][0] not in record["input"]


@pytest.mark.parametrize("dataset", [*SINGLE_DOC, *MULTI_DOC])
def test_answers_lie_at_different_depths(dataset: str) -> None:
    depths = [r["context"].index(r["answers"][0]) / len(r["context"]) for r in read(dataset) if r["answers"][0] != "no"]
    assert max(depths) - min(depths) > 0.4


def passages(record: dict) -> dict[str, str]:
    """Title to text."""
    blocks = re.split(r"Passage \d+:\n", record["context"])[1:]
    found = dict(block.strip().split("\n", 1) for block in blocks)
    assert len(found) == len(blocks)
    return found


def hops(record: dict) -> int:
    """Passages read on the shortest way from the question to the answer, going on from title to title."""
    texts = passages(record)
    reached = {title for title in texts if occurrences(title, record["input"])}
    assert reached, "the question names no passage"
    for count in range(1, 6):
        if any(occurrences(record["answers"][0], texts[title]) for title in reached):
            return count
        reached |= {other for other in texts for title in reached if occurrences(other, texts[title])}
    raise AssertionError("no way from the question to the answer")


@pytest.mark.parametrize("record", of("hotpotqa", "musique"))
def test_answer_needs_several_passages(record: dict) -> None:
    assert hops(record) == 2 if record["dataset"] == "hotpotqa" else 2 <= hops(record) <= 4
    # the answer is in the text of one passage only
    assert sum(occurrences(record["answers"][0], text) > 0 for text in passages(record).values()) == 1


def test_musique_has_different_numbers_of_hops() -> None:
    assert {hops(record) for record in read("musique")} == {2, 3, 4}


def test_2wikimqa_answers_follow_from_the_passages() -> None:
    born, director, grandfather, later, older = read("2wikimqa")

    def year(text: str) -> int:
        return min(int(found) for found in re.findall(r"\b1[789]\d\d\b", text))

    for record, order in ((born, min), (older, min)):
        named = {title: text for title, text in passages(record).items() if title in record["input"]}
        assert len(named) == 2
        assert order(named, key=lambda title: year(named[title])) == record["answers"][0]
    assert hops(director) == hops(grandfather) == 2
    texts = passages(later)
    films = [title for title in texts if title in later["input"]]
    directors = {film: [other for other in texts if other in texts[film] and other != film] for film in films}
    assert len(films) == 2 and all(len(found) == 1 for found in directors.values())
    assert max(films, key=lambda film: year(texts[directors[film][0]])) == later["answers"][0]


@pytest.mark.parametrize("record", of(*SUMMARIES))
def test_summary_states_facts_of_the_text(record: dict) -> None:
    source = record["context"] + record["input"]
    if record["dataset"] == "samsum":
        source = record["input"]
    summary = record["answers"][0]
    figures = re.findall(r"\d[\d,.]*\d|\d", summary)
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", summary)
    assert figures or names
    for fact in [*figures, *names]:
        assert occurrences(fact, source), fact


@pytest.mark.parametrize("record", of("qmsum"))
def test_qmsum_answer_is_about_one_item_of_the_agenda(record: dict) -> None:
    turns = [line for line in record["context"].split("\n") if line]
    assert all(re.match(r"(Chair|Treasurer|Engineer|Secretary|Designer): \S", turn) for turn in turns)
    assert len(turns) > 25


@pytest.mark.parametrize("record", of("trec"))
def test_trec(record: dict) -> None:
    lines = record["context"].split("\n")
    assert all(line.startswith("Question: ") for line in lines[::2])
    kinds = {line.removeprefix("Type: ") for line in lines[1::2]}
    assert kinds == set(record["all_classes"]) and 6 <= len(kinds) <= 10
    assert len(set(lines[::2])) == len(lines) // 2
    assert record["input"].startswith("Question: ") and record["input"].endswith("\nType:")
    assert record["input"].split("\n")[0] not in lines
    # the metric looks for class names inside the prediction, so none may be part of another
    assert not any(a != b and a in b for a in kinds for b in kinds)


@pytest.mark.parametrize("record", of("triviaqa"))
def test_triviaqa(record: dict) -> None:
    assert record["input"].endswith("\nAnswer:")
    shots = re.split(r"(?m)^Passage:\n", record["context"] + "\n" + record["input"] + "\n" + record["answers"][0])[1:]
    assert len(shots) > 3
    for shot in shots:
        passage, question, answer = re.fullmatch(r"(?s)(.*)\nQuestion:\n(.*)\nAnswer:\n(.*?)\n?", shot).groups()
        assert question.endswith("?") and passage.split("\n")[0] in question
        assert occurrences(answer, passage) == 1
    assert occurrences(record["answers"][0], record["context"]) == 0


@pytest.mark.parametrize("record", of("samsum"))
def test_samsum(record: dict) -> None:
    assert record["input"].startswith("Dialogue: ") and record["input"].endswith("\nSummary:")
    shots = record["context"].split("\nDialogue: ")
    assert len(shots) > 4 and len(set(shots)) == len(shots)
    assert all(re.search(r"\nSummary: \S.*\.$", shot) for shot in shots)


@pytest.mark.parametrize("record", of("passage_count"))
def test_passage_count(record: dict) -> None:
    found = re.findall(r"(?m)^Paragraph (\d+): (.+)$", record["context"])
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    different = {text for _, text in found}
    assert record["answers"] == [str(len(different))]
    assert len(different) < len(found)


@pytest.mark.parametrize("record", of("passage_retrieval_en", "passage_retrieval_zh"))
def test_passage_retrieval(record: dict) -> None:
    chinese = record["language"] == "zh"
    found = re.findall(r"(?m)^段落(\d+)：(.+)$" if chinese else r"(?m)^Paragraph (\d+): (.+)$", record["context"])
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    # the prompt of the English set speaks of 30 paragraphs
    assert chinese or len(found) == 30

    def shared(text: str) -> int:
        if chinese:
            pairs = {record["input"][i : i + 2] for i in range(len(record["input"]) - 1)}
            return sum(pair in text for pair in pairs)
        facts = set(re.findall(r"[A-Z][a-z]+|\d[\d,]*", record["input"].split(" ", 3)[3]))
        return sum(occurrences(fact, text) > 0 for fact in facts)

    ranked = sorted(((shared(text), number) for number, text in found), reverse=True)
    assert ranked[0][0] > ranked[1][0]
    assert record["answers"] == [f"{'段落' if chinese else 'Paragraph '}{ranked[0][1]}"]
    assert record["input"] not in record["context"]


def identifiers(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", code))


@pytest.mark.parametrize("record", of("lcc", "repobench-p"))
def test_code_goes_on_with_the_answer(record: dict) -> None:
    source, answer = record["context"] + record["input"], record["answers"][0]
    assert len(record["answers"]) == 1 and answer.strip() and "\n" not in answer
    # the scorer skips lines with these marks, so an answer must not have them
    assert not any(mark in answer for mark in ("`", "#", "//"))
    ast.parse(source + answer + "\n")
    assert answer not in source.split("\n")
    # what the answer names is there already, apart from the name that it may define
    defined = re.match(r"\s*(\w+) = ", answer)
    assert identifiers(answer) - ({defined[1]} if defined else set()) <= identifiers(source)


@pytest.mark.parametrize("record", of("lcc"))
def test_lcc_answer_goes_through_the_fields_in_order(record: dict) -> None:
    """The field of the answer is the one after the field of the lines before it."""
    last = re.split(r"(?m)^class ", record["context"])[-1]
    signature = "def __init__(self, "
    fields = last[last.index(signature) + len(signature) :].split(")")[0].split(", ")
    asked = [field for field in fields if field in identifiers(record["answers"][0])]
    body = last[last.rindex("    def ") :].split("\n", 1)[1]
    done = [field for field in fields if field in identifiers(body)]
    at = fields.index(asked[0])
    assert len(asked) == 1 and done in (fields[:at], fields[: at + 1])


@pytest.mark.parametrize("record", of("repobench-p"))
def test_repobench_answer_uses_what_another_file_defines(record: dict) -> None:
    files = re.findall(r"(?m)^# Path: (\S+)$", record["context"])
    assert len(files) == len(set(files)) >= 3
    assert re.match(r"# Path: \S+\n", record["input"])
    imported = set(re.findall(r"(?m)^from \S+ import (\w+)$", record["input"]))
    used = imported & identifiers(record["answers"][0])
    if not used:  # a method of an imported class, called on an argument
        classes = {name.lower(): name for name in imported}
        used = {classes[name] for name in identifiers(record["answers"][0]) if name in classes}
        methods = set(re.findall(r"\.(\w+)\(", record["answers"][0]))
        assert methods and all(f"def {method}(" in record["context"] for method in methods)
    assert len(used) == 1
    assert re.search(rf"(?m)^(def|class) {used.pop()}\b", record["context"])


@pytest.mark.parametrize("dataset", DATASETS)
def test_first_record_is_the_shortest(dataset: str) -> None:
    """Short runs take the first records, so they must be the quick ones."""
    sizes = [len(record["context"]) for record in read(dataset)]
    assert sizes[0] == min(sizes)
    assert max(sizes) > 1.5 * sizes[0]
