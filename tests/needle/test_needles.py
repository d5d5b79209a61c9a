from __future__ import annotations

import pytest

from kvfactory.needle.needles import DEFAULT_NEEDLE, NEEDLES, Needle, new_words, read_needle, words
from kvfactory.probe.haystack import generated_haystack


def test_words_lose_the_punctuation_around_them_only():
    assert words('On a "sunny" day. (It\'s 3.5 **well-known** miles…)') == (
        ["on", "a", "sunny", "day", "it's", "3.5", "well-known", "miles"]
    )
    assert words("--- ... _") == []


def test_own_needles_are_answerable_and_not_given_away():
    assert len(NEEDLES) >= 3 and len({n.name for n in NEEDLES}) == len(NEEDLES) and NEEDLES[0] is DEFAULT_NEEDLE
    text = " ".join(generated_haystack(42).sentences)
    for needle in NEEDLES:
        assert needle.text == needle.text.strip() and needle.text not in text
        assert len(set(needle.expected)) == len(needle.expected) >= 8
        assert set(needle.expected) <= set(words(needle.text)) - set(words(needle.question))
        # Most of what is asked for cannot be picked up from the haystack.
        assert sum(word in words(text) for word in needle.expected) < len(needle.expected) / 2


def test_needle_file(tmp_path):
    path = tmp_path / "vault.txt"
    path.write_text("\ufeff\nThe code of the vault, they say, is Blue blue seven.\n\n", encoding="utf-8")
    text = "The code of the vault, they say, is Blue blue seven."
    expected = Needle("vault", text, "What is the code of the vault?", ("they", "say", "blue", "seven"))
    assert read_needle(path, " What is the code of the vault?\n") == expected
    assert new_words("b a b", "") == ("b", "a")
    assert read_needle() is DEFAULT_NEEDLE


def test_refusals(tmp_path):
    path = tmp_path / "n.txt"
    with pytest.raises(ValueError, match=r"--needle_file .*n.txt cannot be read"):
        read_needle(path, "Who?")
    path.write_text(" \n...\n")
    with pytest.raises(ValueError, match=r"--needle_file .*n.txt holds no words"):
        read_needle(path, "Who?")
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="UTF-8"):
        read_needle(path, "Who?")
    path.write_text("Ann did.")
    for missing in (None, " "):
        with pytest.raises(ValueError, match=r"needs --question"):
            read_needle(path, missing)
    with pytest.raises(ValueError, match=r"--question 'Did Ann\?' holds every word"):
        read_needle(path, "Did Ann?")
    with pytest.raises(ValueError, match=r"--question is asked about the needle of --needle_file"):
        read_needle(None, "Who?")
