"""The file of --ids by itself; how runs read it is in tests/runner/test_runner_ids.py."""

from __future__ import annotations

import pytest

from kvfactory.data.subset_ids import read_ids


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_lines_end_at_newlines_alone(home):
    """As records' lines do: an `_id` may hold what else ends a line for Python."""
    names = [f"a{end}b" for end in "\v\f\x1c\x85\u2028\r"]
    (home / "ids").write_bytes("\n".join(names).encode())
    assert list(read_ids(home / "ids").lines) == names


def test_the_home_folder_is_found(home):
    (home / "ids").write_text("a")
    assert read_ids("~/ids").path == home / "ids"


def test_one_id_that_is_missing_has_no_further_ones(home):
    (home / "ids").write_text("a\n\nb\nc\n")
    ids = read_ids(home / "ids")
    ids.check_found({"c", "b", "a", "d"}, ["trec"])
    with pytest.raises(ValueError) as error:
        ids.check_found({"a", "c"}, ["trec", "lsht"])
    told = f"--ids {home / 'ids'}, line 3: _id 'b' is in none of the selected datasets (trec, lsht): correct the file"
    assert str(error.value).startswith(told)


def test_long_ids_are_cut_in_messages(home):
    (home / "ids").write_text("a\n" + "b" * 9000)
    with pytest.raises(ValueError, match=r"line 2: _id 'b+\.\.\. \(9002 characters\) is in none") as error:
        read_ids(home / "ids").check_found({"a"}, ["trec"])
    (home / "ids").write_text("b" * 9000 + "\na\n" + "b" * 9000)
    with pytest.raises(ValueError, match=r"line 3: _id 'b+\.\.\. .* on line 1 already") as again:
        read_ids(home / "ids")
    assert len(str(error.value)) < 400 > len(str(again.value))
