from __future__ import annotations

import pytest

from kvfactory.ruler.tasks import RULER_TASKS, canonical_ruler_task, get_ruler_task


def test_the_official_suite():
    assert len(RULER_TASKS) == 13
    assert {name: task.max_new_tokens for name, task in RULER_TASKS.items() if task.category != "niah"} == {
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
        "qa_2": 32,
    }
    niah = [task for task in RULER_TASKS.values() if task.category == "niah"]
    assert len(niah) == 8 and {task.max_new_tokens for task in niah} == {128}
    assert {name for name, task in RULER_TASKS.items() if task.metric == "string_match_part"} == {"qa_1", "qa_2"}
    for name, task in RULER_TASKS.items():
        assert (task.name, task.examples, task.chat, task.first_line) == (name, 500, True, False)
        assert task.metric in ("string_match_all", "string_match_part")


def test_names():
    assert canonical_ruler_task(" NIAH_Single_1") == "niah_single_1"
    assert get_ruler_task("VT") is RULER_TASKS["vt"]
    with pytest.raises(ValueError, match="unknown RULER task 'niah_singel_1'. Did you mean niah_single_1"):
        get_ruler_task("niah_singel_1")
