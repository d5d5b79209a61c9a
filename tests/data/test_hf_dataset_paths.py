"""A local folder of --hf_dataset is found however it is typed, and is known by its records, not by its name."""

from __future__ import annotations

import pytest

from kvfactory.data.hub_dataset import open_hub_dataset


@pytest.mark.parametrize("typed", [".", "../copy", "~/copy", "inner/.."])
def test_a_folder_is_found_however_it_is_typed(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "copy"
    (folder / "inner").mkdir(parents=True)
    monkeypatch.chdir(folder)
    source = open_hub_dataset(typed)
    assert (source.given, source.id, source.revision, source.folder) == (typed, None, None, folder.resolve())


@pytest.mark.parametrize("typed", ["copy", "link"])
def test_a_loading_script_has_the_name_of_the_folder_itself(typed, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    (tmp_path / "copy" / "link.py").touch()
    assert open_hub_dataset(str(tmp_path / typed)).folder == tmp_path / "copy"
    (tmp_path / "copy" / "copy.py").touch()
    with pytest.raises(ValueError, match="holds the loading script copy.py"):
        open_hub_dataset(str(tmp_path / typed))
