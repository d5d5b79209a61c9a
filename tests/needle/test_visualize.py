"""scripts/scripts_needle/visualize.py on our result files and on KVCache-Factory's."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from kvfactory.needle.needles import DEFAULT_NEEDLE
from kvfactory.needle.scores import needle_scores

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "scripts_needle" / "visualize.py"


@pytest.fixture(scope="module")
def visualize():
    spec = importlib.util.spec_from_file_location("needle_visualize", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.main


def our_row(length: int, depth: int, pred: str | None) -> dict:
    row = {"_id": f"len{length}_depth{depth}_oster-quay", "context_length": length, "depth_percent": depth}
    if pred is None:
        return row | {"error": "out of memory"}
    scores = needle_scores(DEFAULT_NEEDLE, pred)
    return row | {"answers": [DEFAULT_NEEDLE.text], "pred": pred, "scores": scores, "score": scores["recall"]}


def write_run(save_dir: Path, run: str, label: str, rows: list[dict]) -> Path:
    path = save_dir / run / "needle" / f"{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def save_dir(tmp_path):
    full = [our_row(n, d, DEFAULT_NEEDLE.text) for n in (500, 900) for d in (0, 100)]
    lost = [our_row(500, 0, "red canoe"), our_row(500, 100, DEFAULT_NEEDLE.text), our_row(900, 100, None)]
    write_run(tmp_path, "m_128", "FullKV", full)
    write_run(tmp_path, "m_128", "StreamingLLM+kv_head", lost)
    write_run(tmp_path, "m_r0.2", "SnapKV+r0.2", full)
    write_run(tmp_path, "m_r0.2", "SnapKV+r0.2.shard0of2", full)
    (tmp_path / "m_128" / "meta").mkdir()
    (tmp_path / "m_128" / "meta" / "FullKV.json").write_text('{"settings": {"trained_length": 600}}')
    (tmp_path / "m_128" / "qasper").mkdir()
    (tmp_path / "m_128" / "qasper" / "FullKV.json").write_text("not read")
    return tmp_path


def made(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in (".png", ".csv"))


STREAMING = ["StreamingLLM+kv_head.csv", "StreamingLLM+kv_head.png"]


@pytest.mark.parametrize("folder", ["m_128", "m_128/needle"])
def test_one_run(visualize, save_dir, folder, capsys):
    assert visualize([str(save_dir / folder)]) == 0
    assert made(save_dir / "m_128/needle") == ["FullKV.csv", "FullKV.png", *STREAMING]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FullKV: recall 1.0000 over 4 results (")
    assert second.startswith("StreamingLLM+kv_head: recall 0.5909 over 2 results, 1 failed (")  # (2/11 + 1) / 2
    table = (save_dir / "m_128/needle/StreamingLLM+kv_head.csv").read_text()
    assert table == "depth_percent,500,900\n0,0.181818,\n100,1,\n"
    assert not made(save_dir / "m_r0.2")


def test_all_runs_of_a_save_dir_and_another_score(visualize, save_dir, capsys):
    assert visualize([str(save_dir), "--value", "exact"]) == 0
    assert made(save_dir / "m_r0.2") == ["needle/SnapKV+r0.2.csv", "needle/SnapKV+r0.2.png"]  # not the shard
    assert [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        "FullKV: exact 1.0000 over 4 results",
        "StreamingLLM+kv_head: exact 0.5000 over 2 results, 1 failed",
        "SnapKV+r0.2: exact 1.0000 over 4 results",
    ]


def test_trained_length_of_the_record_and_of_the_flag(visualize, save_dir):
    def picture(*flags):
        assert visualize([str(save_dir / "m_128"), *flags]) == 0
        return (save_dir / "m_128/needle/FullKV.png").read_bytes()

    recorded = picture()
    assert recorded == picture("--trained_length", "600") != picture("--trained_length", "900")


# A made-up needle in the original's form: the answer follows the first "is" and ends in a full stop.
ORIGINAL_NEEDLE = "\nThe oddest thing to bake in Lower Fenwick is a plum pie, and a loaf is no match.\n"


def write_original(folder: Path, length: int, depth: int, response: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{folder.name}_len_{length}_depth_{depth * 100}_results.json"
    cell = {"model": "m", "context_length": length, "depth_percent": depth, "version": 1, "needle": ORIGINAL_NEEDLE}
    path.write_text(json.dumps(cell | {"model_response": response, "score": 9.9}))
    return path


@pytest.mark.parametrize("above", [False, True])
def test_files_of_the_original(visualize, tmp_path, above, capsys):
    folder = tmp_path / "results" / "Llama_snapkv_96"
    # Expected: a plum pie and loaf is no match, 8 distinct words.
    write_original(folder, 1000, 0, "A plum pie, and a loaf is no match")
    write_original(folder, 1000, 50, "plum pie. The oddest thing to bake")
    write_original(folder, 2000, 0, "")
    assert visualize([str(folder.parent if above else folder)]) == 0
    assert capsys.readouterr().out.startswith("Llama_snapkv_96: recall 0.4167 over 3 results (")
    assert (folder / "Llama_snapkv_96.csv").read_text() == "depth_percent,1000,2000\n0,1,0\n50,0.25,\n"
    assert (folder / "Llama_snapkv_96.png").is_file()
    assert visualize([str(folder), "--value", "rouge1_f10"]) == 0  # from the answer, not the stored score


def refused(visualize, capsys, *arguments) -> str:
    assert visualize([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def test_refusals(visualize, tmp_path, capsys):
    assert "is not a folder" in refused(visualize, capsys, tmp_path / "none")
    assert "holds no needle results" in refused(visualize, capsys, tmp_path)
    (tmp_path / "needle").mkdir()
    assert "holds no needle results" in refused(visualize, capsys, tmp_path / "needle")
    path = write_run(tmp_path, "m_128", "FullKV", [{"_id": "a", "pred": "x", "answers": ["x"], "score": 1.0}])
    assert f"{path}: row 'a' is no needle result" in refused(visualize, capsys, tmp_path)
    path.write_text("{]\n{}\n")
    assert f"{path} line 1 is broken" in refused(visualize, capsys, tmp_path)
    write_run(tmp_path, "m_128", "FullKV", [our_row(500, 0, None)])
    assert "no result to draw for m_128: FullKV: none of 1 rows" in refused(visualize, capsys, tmp_path)
    cell = write_original(tmp_path / "theirs", 1000, 0, "pie")
    cell.write_text(json.dumps({"model": "m", "needle": "x"}))
    assert f"{cell} is no result of KVCache-Factory's needle test" in refused(visualize, capsys, cell.parent)
