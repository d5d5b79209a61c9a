"""How a local folder of --hf_dataset is named in the run record, however it was typed."""

from __future__ import annotations

import pytest

from kvfactory.data.hub_dataset import open_hub_dataset


@pytest.mark.parametrize("typed", [".", "../copy", "~/copy", "inner/.."])
def test_a_folder_has_the_name_it_has_on_disk(typed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "copy"
    (folder / "inner").mkdir(parents=True)
    monkeypatch.chdir(folder)
    source = open_hub_dataset(typed)
    assert (source.given, source.id, source.revision, source.folder) == (typed, "copy", None, folder.resolve())


def test_a_link_has_the_name_of_what_it_leads_to(tmp_path):
    """So that a run goes on when it is given the folder itself."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert open_hub_dataset(str(tmp_path / "link")).id == "copy"
