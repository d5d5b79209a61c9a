"""--device_map: which part of a model goes where, and files that cannot be followed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config
from tiny_checkpoint import save_checkpoint
from transformers import AutoModelForCausalLM

from kvfactory.capability import FAMILIES
from kvfactory.device_map import is_spread, resolve_device_map, spread, weight_bytes, whole_parts
from kvfactory.loading import check_attachable, hardware, load_model, open_checkpoint, resolve_computation
from kvfactory.plan import make_plan

GIB = 2**30


def empty(family="llama", **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes))


@pytest.fixture
def gpus(monkeypatch):
    """Sets how many bytes are free on each of so many pretended GPUs."""

    def pretend(*free):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(free))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: (free[i], free[i]))

    return pretend


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_hold_every_weight_once(family):
    model = empty(family)
    parts = whole_parts(model)
    assert [p for p in parts if ".layers." in p] == [f"model.layers.{i}" for i in range(3)]
    for name, _ in model.named_parameters():
        assert sum(name.startswith(part + ".") for part in parts) == 1, name
    assert all(not p.startswith(q + ".") for p in parts for q in parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_even_spread_is_even_in_order_and_whole(family, count):
    model = empty(family, num_hidden_layers=24)
    places = spread(model, [1.0] * count)
    assert list(places) == whole_parts(model) and places["model.rotary_emb"] == places["model.embed_tokens"] == 0
    heavy = [i for part, i in places.items() if weight_bytes(model.get_submodule(part), 1)]
    assert heavy == sorted(heavy) and set(heavy) == set(range(count))
    sizes = {part: weight_bytes(model.get_submodule(part), 1) for part in places}
    held = [sum(size for part, size in sizes.items() if places[part] == i) for i in range(count)]
    # The boundary lies in the middle of some part, so a device is off by at most half a part at either end.
    assert max(abs(h - sum(sizes.values()) / count) for h in held) <= max(sizes.values())


def test_shares_follow_what_is_free():
    places = spread(empty(num_hidden_layers=24), [1.0, 3.0])
    layers = [places[f"model.layers.{i}"] for i in range(24)]
    assert 5 <= layers.count(0) <= 7


def test_a_tied_head_stays_with_its_embedding():
    model = empty(tie_word_embeddings=True)
    model.tie_weights()
    places = spread(model, [1.0, 1.0])
    assert places["lm_head"] == places["model.embed_tokens"] == 0 and places["model.layers.2"] == 1
    assert spread(empty(), [1.0, 1.0])["lm_head"] == 1


def test_auto_takes_one_device_where_that_is_enough(gpus):
    model = empty()
    need = weight_bytes(model, 2)
    assert resolve_device_map("auto", model, "cpu", 2) is None
    gpus(1)
    assert resolve_device_map("auto", model, "cuda", 2) == {"": 0}  # loading says whether it fits
    gpus(2 * need, 2 * need)
    assert resolve_device_map("auto", model, "cuda", 2) == {"": 0}
    gpus(need, need)
    found = resolve_device_map("auto", model, "cuda", 2)
    assert set(found.values()) == {0, 1} and is_spread(found) and not is_spread({"": 0}) and not is_spread(None)
    gpus(need // 3, need // 3)
    with pytest.raises(ValueError, match="weights take 0.0 GiB and the 2 visible CUDA devices have 0.0 GiB free"):
        resolve_device_map("auto", model, "cuda", 2)


def test_a_launcher_asks_for_no_context(gpus, monkeypatch):
    model = empty()
    need = weight_bytes(model, 2)
    total = [2 * need]
    gpus(0, 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: pytest.fail("a context on a GPU of the shards"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=total[0]))
    assert resolve_device_map("auto", model, "cuda", 2, launches=True) == {"": 0}
    total[0] = need
    assert is_spread(resolve_device_map("auto", model, "cuda", 2, launches=True))


def test_balanced_spreads_whatever_fits(gpus):
    gpus(GIB, GIB, GIB)
    assert set(resolve_device_map("balanced", empty(num_hidden_layers=24), "cuda", 2).values()) == {0, 1, 2}
    gpus(GIB)
    assert resolve_device_map("balanced", empty(), "cuda", 2) == {"": 0}
    with pytest.raises(ValueError, match="--device_map balanced .* on the CPU"):
        resolve_device_map("balanced", empty(), "cpu", 4)


def test_a_file_is_followed(gpus, tmp_path):
    gpus(GIB, GIB)
    file = tmp_path / "map.json"
    typed = {"model.embed_tokens": "cuda:1", "model.layers": 0, "model.norm": "cuda", "lm_head": "cpu"}
    file.write_text(json.dumps(typed))
    want = {"model.embed_tokens": 1, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 0, "model.norm": 0}
    assert resolve_device_map(str(file), empty(), "cuda", 2) == want | {"lm_head": "cpu", "model.rotary_emb": 1}
    file.write_text('{"": 1}')
    assert resolve_device_map(str(file), empty(), "cuda", 2) == {"": 1}
    file.write_text('{"model": "cpu", "lm_head": "cpu"}')
    assert resolve_device_map(str(file), empty(), "cpu", 4) is None


REFUSED = [
    ("{", "is not JSON"),
    ("[1]", "must hold one JSON object"),
    ("{}", "must hold one JSON object"),
    ('{"": 0, "": 1}', "'' occurs twice"),
    ('{"model": 0}', "gives no device to lm_head: every part"),
    ('{"model.layers": 0, "lm_head": 0}', "gives no device to model.embed_tokens, model.norm:"),
    ('{"model": 0, "lm_head": 0, "model.layers.7": 1}', "'model.layers.7' is no module of this model; its parts are"),
    ('{"": 0, "lm_head": 1}', "'lm_head' lies inside '', which has a device already"),
    ('{"model.layers.0.mlp": 0}', "'model.layers.0.mlp' is a piece of 'model.layers.0', which stays whole"),
    ('{"": 2}', "'' is on CUDA device 2, and the visible ones are 0 to 1"),
    ('{"": "cuda:5"}', "'' is on CUDA device 5, and the visible ones are 0 to 1"),
    ('{"": "disk"}', '\'\' is on "disk", which is neither "cpu" nor a CUDA device'),
    ('{"": -1}', "'' is on -1, which is neither"),
    ('{"": true}', "'' is on true, which is neither"),
    ('{"": 0.5}', "'' is on 0.5, which is neither"),
    ('{"": null}', "'' is on null, which is neither"),
    ('{"": "cpu"}', "names no CUDA device: give --device cpu"),
]


@pytest.mark.parametrize("content, sentence", REFUSED)
def test_files_that_cannot_be_followed(gpus, tmp_path, content, sentence):
    gpus(GIB, GIB)
    file = tmp_path / "map.json"
    file.write_text(content)
    with pytest.raises(ValueError) as refusal:
        resolve_device_map(str(file), empty(), "cuda", 2)
    text = str(refusal.value)
    assert text.startswith(f"--device_map {file}") and sentence in text and "\n" not in text


def test_files_that_are_not_there_or_name_gpus_on_the_cpu(tmp_path):
    with pytest.raises(ValueError, match="neither auto nor balanced nor a file that exists"):
        resolve_device_map("sequential", empty(), "cpu", 4)
    with pytest.raises(ValueError, match="cannot be read"):
        resolve_device_map(str(tmp_path), empty(), "cpu", 4)
    file = tmp_path / "map.json"
    file.write_text('{"model": "cpu", "lm_head": 0}')
    with pytest.raises(ValueError, match="'lm_head' is on CUDA device 0, but this run is on the CPU"):
        resolve_device_map(str(file), empty(), "cpu", 4)


def test_loading_follows_the_map_and_the_record_names_it(tmp_path, gpus, monkeypatch):
    checkpoint = open_checkpoint(str(save_checkpoint(tmp_path / "tiny")))
    gpus(GIB, GIB)
    computation = resolve_computation(checkpoint, "cuda", device_map="balanced")
    assert set(computation.device_map.values()) == {0, 1}
    monkeypatch.setattr("kvfactory.graph_support.why_torch", lambda device: None)
    [(computed, why)] = check_attachable(checkpoint, [make_plan("snapkv")], computation)
    assert (computed.decode, why) == ("loop", "the model lies on several devices")
    [(computed, why)] = check_attachable(checkpoint, [make_plan("snapkv")], resolve_computation(checkpoint, "cuda"))
    assert (computed.decode, why) == ("graph", None)
    given = {}

    class Loaded(Exception):
        pass

    def from_pretrained(folder, **options):
        given.update(options)
        raise Loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(Loaded):
        load_model(checkpoint, computation)
    assert given["device_map"] == computation.device_map
    assert hardware("cpu", {"model.norm": 1, "lm_head": "cpu"})["device_map"] == {
        "model.norm": "cuda:1",
        "lm_head": "cpu",
    }
    assert "device_map" not in hardware("cpu")


def test_a_map_of_one_gpu_makes_it_the_current_one(tmp_path, gpus, monkeypatch):
    checkpoint = open_checkpoint(str(save_checkpoint(tmp_path / "tiny")))
    gpus(GIB, GIB)
    file = tmp_path / "map.json"
    file.write_text('{"": 1}')
    computation = resolve_computation(checkpoint, "cuda", device_map=str(file))

    class Chosen(Exception):
        pass

    def set_device(index):
        raise Chosen(index)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(Chosen, match="1"):
        load_model(checkpoint, computation)
