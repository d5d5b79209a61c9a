from __future__ import annotations

import pytest

from kvfactory.probe.haystack import generated_haystack, read_haystack, read_texts
from kvfactory.probe.needles import KINDS, needles


def test_haystacks(tmp_path):
    (tmp_path / "b.txt").write_text("One is here. Two\nfollows!  And three?")
    (tmp_path / "a.txt").write_text("四在这里。五也在。")
    (tmp_path / "c.md").write_text("Not read.")
    found = read_haystack(tmp_path, 1)
    assert sorted(found.sentences) == sorted(["One is here.", "Two follows!", "And three?", "四在这里。", "五也在。"])
    assert read_haystack(tmp_path / "b.txt", 1).sentences == ("One is here.", "Two follows!", "And three?")
    assert read_haystack(tmp_path, 1) == found
    endless = iter(found)
    assert [next(endless) for _ in range(6)][5] == found.sentences[0]
    assert generated_haystack(1) == generated_haystack(1) != generated_haystack(2)


def test_the_seed_orders_the_files_of_a_folder(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"File {number}.")
    orders = {read_haystack(tmp_path, seed).sentences for seed in range(5)}
    assert len(orders) > 1 and {tuple(sorted(order)) for order in orders} == {tuple(f"File {n}." for n in range(6))}
    assert list(read_texts(tmp_path)) == [f"{number}.txt" for number in range(6)]
    with pytest.raises(ValueError, match="^--essays_dir .*nowhere does not exist"):
        read_haystack(tmp_path / "nowhere", 0, "--essays_dir")


def test_generated_haystack_answers_no_question():
    text = " ".join(generated_haystack(42).sentences)
    for kind in KINDS:
        for needle in needles(kind):
            assert needle.answer not in text


def test_empty_or_unreadable_haystacks(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        read_haystack(tmp_path, 0)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="UTF-8"):
        read_haystack(tmp_path, 0)
