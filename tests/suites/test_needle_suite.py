"""The needle as a suite: prompts and their answers stay within each length, for every length up to the window."""

from __future__ import annotations

import pytest
from tiny_checkpoint import save_checkpoint

from kvfactory import cli
from kvfactory.loading import open_checkpoint
from kvfactory.methods import METHODS
from kvfactory.needle.haystack import NeedleHaystack
from kvfactory.needle.needles import NEEDLES
from kvfactory.suites.needle import NeedleSettings


@pytest.fixture
def dataset(tmp_path):
    """dataset(*flags) -> (suite, encoder, its one dataset) on the tiny model, whose window is 2,048."""
    model = save_checkpoint(tmp_path / "model", layers=1)

    def build(*flags):
        argv = ["--method", "snapkv", "--model_path", str(model), "--s_len", "2048", "--e_len", "2048"]
        settings, _ = cli.parse([*argv, *flags], NeedleSettings)
        suite, checkpoint = settings.checked(METHODS).suite(), open_checkpoint(str(model))
        encoder = suite.encoder(checkpoint)
        [found] = suite.datasets(checkpoint, encoder)
        return suite, encoder, found

    return build


@pytest.mark.parametrize("new_tokens", [4, 64, 400])
def test_a_prompt_and_its_answer_fill_the_length_and_no_more(dataset, new_tokens):
    suite, encoder, found = dataset("--max_new_tokens", str(new_tokens), "--needle", "all")
    for record in found.records:
        tokens = suite.encode(encoder, found, record)[1].prompt_tokens
        assert 2048 - 200 < tokens + new_tokens <= 2048


def test_text_with_more_tokens_when_tokenised_again_is_cut_further(dataset, monkeypatch):
    place = NeedleHaystack.place

    def grown(self, length, depth, needle, overhead=0):
        ids = place(self, length, depth, needle, overhead)
        return ids + ids[-(len(ids) // 50) :]  # 2 % more, as a decoded text can have

    monkeypatch.setattr(NeedleHaystack, "place", grown)
    suite, encoder, found = dataset("--max_new_tokens", "400")
    for record in found.records:
        assert 2048 - 60 < suite.encode(encoder, found, record)[1].prompt_tokens + 400 <= 2048


def test_every_needle_has_every_cell_lengths_outermost(dataset):
    _, _, found = dataset("--s_len", "1000", "--step", "1048", "--depths", "100,0", "--needle", "all")
    places = [(record["needle"], record["length"], record["depth"]) for record in found.records]
    cells = [(1000, 100), (1000, 0), (2048, 100), (2048, 0)]
    assert places == [(needle.name, *cell) for needle in NEEDLES for cell in cells]
    assert len({record["_id"] for record in found.records}) == len(places)


def test_a_grid_far_beyond_the_window_is_refused_without_being_listed(dataset):
    with pytest.raises(ValueError, match="--e_len 1000000000000000 is above the model's window of 2048"):
        dataset("--e_len", str(10**15), "--step", "1")


@pytest.mark.parametrize("flag", ["needle_file", "haystack_dir"])
def test_empty_paths(dataset, flag):
    with pytest.raises(ValueError, match=f"--{flag} is empty"):
        dataset(f"--{flag}", "")


def test_a_part_of_the_grid(dataset):
    _, _, found = dataset("--max_num_examples", "4")
    assert [record["depth"] for record in found.records] == [0, 11, 22, 33]
