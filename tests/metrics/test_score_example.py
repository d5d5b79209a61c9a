"""The entry point: one score per prediction for every dataset name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvfactory.data.tasks import LONGBENCH_E, TASKS
from kvfactory.metrics import METRICS, extra_scores, score_example, scored_text


def test_every_task_has_a_metric_and_every_metric_a_task():
    assert {task.metric for task in TASKS.values()} == set(METRICS.names())


@pytest.mark.parametrize("dataset", [*TASKS, *LONGBENCH_E])
def test_a_right_answer_scores_one(dataset):
    answer = {"passage_count": "7", "passage_retrieval_en": "Paragraph 7", "passage_retrieval_zh": "段落7"}.get(
        dataset.removesuffix("_e"), "北京大学"
    )
    # ROUGE's perfect score is 0.999999995; everything else is exact
    assert score_example(dataset, answer, ["nothing 0 Paragraph 1 段落1", answer], ["北京大学"]) == pytest.approx(
        1, abs=1e-8
    )


def test_best_answer_counts():
    assert score_example("hotpotqa", "the cat", ["dog", "cat sat", "cat"]) == 1.0
    assert score_example("hotpotqa", "the cat", ["dog"]) == 0.0


def test_no_answers_score_zero():
    assert score_example("hotpotqa", "cat", []) == 0.0
    assert extra_scores("gov_report", "cat", []) == {"rougeL_rs": 0.0, "rougeLsum_rs": 0.0}


FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")


@pytest.mark.parametrize("dataset", list(TASKS))
def test_first_line_rule(dataset):
    text = "\n\n cat\r\nsecond"
    assert scored_text(dataset, text) == (" cat\r" if dataset in FEW_SHOT else text)


def test_first_line_rule_reaches_the_score():
    assert score_example("triviaqa_e", "\ncat\nQuestion: dog", ["cat"]) == 1.0
    assert score_example("hotpotqa", "\ncat\nQuestion: dog", ["cat"]) < 1.0
    # a first line of blanks is a line
    assert score_example("triviaqa", " \ncat", ["cat"]) == 0.0


def test_names_ignore_case_and_unknown_ones_are_explained():
    assert score_example("HotpotQA", "cat", ["cat"]) == 1.0
    with pytest.raises(ValueError, match="hotpotqa"):
        score_example("hotpotqaa", "cat", ["cat"])


def test_wrong_types_are_errors():
    with pytest.raises(ValueError, match="list of strings"):
        score_example("hotpotqa", "cat", "cat")
    with pytest.raises(ValueError, match="prediction"):
        score_example("hotpotqa", None, ["cat"])
    with pytest.raises(ValueError, match="all_classes"):
        score_example("trec", "cat", ["cat"])


def test_extra_scores_apply_where_they_mean_something():
    classes = ["A", "AB", "ABC", "ABCD", "x"]
    assert extra_scores("trec", "ABCD\nx", ["ABCD"], classes) == {"clean_classification": 1.0}
    assert set(extra_scores("samsum_e", "a", ["a"])) == {"rougeL_rs", "rougeLsum_rs"}
    assert extra_scores("vcsum", "好", ["好"]) == {}
    assert extra_scores("hotpotqa", "a", ["a"]) == {}


def test_odd_characters_do_not_break_a_metric():
    text = "a\u2028b \ud800 \x0b\U0001f600"
    for dataset in ("hotpotqa", "gov_report", "lcc", "passage_count", "multifieldqa_zh", "dureader"):
        assert 0.0 <= score_example(dataset, text, [text]) <= 1.0


def run_python(body: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)


def test_scoring_needs_no_torch_and_no_module_named_rouge():
    result = run_python(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['rouge'] = None\n"
        "from kvfactory.metrics import score_example\n"
        "assert 'jieba' not in sys.modules and 'fuzzywuzzy' not in sys.modules\n"
        "print(score_example('gov_report', 'a', ['a']), score_example('lcc', 'a', ['a']))\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["0.999999995", "1.0"]


def test_chinese_scoring_is_quiet():
    result = run_python("from kvfactory.metrics import score_example\nprint(score_example('vcsum', '好', ['好']))\n")
    assert (result.stdout, result.stderr) == ("0.999999995\n", "")


@pytest.mark.parametrize(
    "dataset, package", [("dureader", "jieba"), ("multifieldqa_zh", "jieba"), ("lcc", "fuzzywuzzy")]
)
def test_a_missing_package_is_an_error_and_not_a_zero(dataset, package):
    result = run_python(
        f"import sys\nsys.modules[{package!r}] = None\n"
        "from kvfactory.metrics import score_example\n"
        f"try:\n    print(score_example({dataset!r}, 'a', ['a']))\n"
        "except ValueError as error:\n    print('refused', error)\n"
    )
    assert result.stdout.startswith("refused") and package in result.stdout
