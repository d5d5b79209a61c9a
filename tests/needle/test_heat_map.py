"""The picture is read back pixel by pixel: colours, blanks and the line are what the rows say."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from kvfactory.needle.heat_map import COLOURS, DPI, SIZE, write_heat_map


def row(length: int, depth: int, recall: float, **more) -> dict:
    scores = {"recall": recall, "exact": int(recall == 1), "rouge1_f10": 5 * recall}
    return {"context_length": length, "depth_percent": depth, "scores": scores} | more


def failed(length: int, depth: int) -> dict:
    return {"_id": "x", "context_length": length, "depth_percent": depth, "error": "out of memory"}


ROWS = [row(2000, 0, 1.0), row(1000, 50, 0.0), row(1000, 0, 0.5), row(1000, 100, 0.25), failed(2000, 50)]


def draw(tmp_path, rows, **more):
    png, table = tmp_path / "SnapKV+r0.2.png", tmp_path / "SnapKV+r0.2.csv"
    mean = write_heat_map(rows, png, table, "a_$b$: SnapKV", **more)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SnapKV+r0.2.csv", "SnapKV+r0.2.png"]  # no temp file stays
    return mean, table.read_text(), np.array(Image.open(png).convert("RGB"))


def share(pixels, colour: str) -> float:
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return float((np.abs(pixels.astype(int) - rgb).max(axis=-1) <= 2).mean())


def test_table_and_mean(tmp_path):
    mean, table, _ = draw(tmp_path, ROWS)
    assert mean == pytest.approx(1.75 / 4)
    assert table == "depth_percent,1000,2000\n0,0.5,1\n50,0,\n100,0.25,\n"


def test_a_place_where_all_failed_is_on_the_axes(tmp_path):
    _, table, _ = draw(tmp_path, [row(1000, 0, 1.0), failed(2000, 50), {"_id": "x", "error": "told without its place"}])
    assert table == "depth_percent,1000,2000\n0,1,\n50,,\n"


def test_several_needles_share_a_cell(tmp_path):
    mean, table, _ = draw(tmp_path, [row(500, 0, 1.0), row(500, 0, 0.0), row(500, 0, 0.0), row(900, 0, 1.0)])
    assert (mean, table) == (0.5, "depth_percent,500,900\n0,0.333333,1\n")


def test_other_scores_have_their_own_range(tmp_path):
    mean, table, pixels = draw(tmp_path, [row(500, 0, 1.0), row(900, 0, 1.0)], value="rouge1_f10")
    assert (mean, table) == (5.0, "depth_percent,500,900\n0,5,5\n")
    assert share(pixels, COLOURS[1]) > 0.3  # 5 of 10 is the middle


def test_picture(tmp_path):
    _, _, pixels = draw(tmp_path, ROWS)
    with Image.open(tmp_path / "SnapKV+r0.2.png") as image:
        assert image.size == (SIZE[0] * DPI, SIZE[1] * DPI) == (1800, 750)
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)  # stored as whole dots a metre
    shares = [share(pixels, colour) for colour in COLOURS]
    assert min(shares) > 0.08 and max(shares) - min(shares) < 0.02  # one of six cells each
    # Blanks are the page's white: two more cells than in a picture without gaps.
    full = [r for r in ROWS if "error" not in r] + [row(2000, 50, 1.0), row(2000, 100, 1.0)]
    whole = draw(tmp_path, full)[2]
    assert share(pixels, "#FFFFFF") - share(whole, "#FFFFFF") == pytest.approx(2 * shares[0], abs=0.02)


LINE_ROWS = [row(length, depth, 1.0) for length in (1000, 2000, 3000, 4000) for depth in (0, 100)]


def dashed_places(pixels) -> set[float]:
    """Where dashed white columns are, in cells from the left."""
    body = np.abs(pixels.astype(int) - [0x0C, 0xD7, 0x9F]).max(axis=-1) <= 2
    left, right = np.flatnonzero(body.any(axis=0))[[0, -1]]
    band = pixels[np.flatnonzero(body.any(axis=1))][:, left : right + 1]
    edge = np.flatnonzero(body.mean(axis=0) > 0.5)
    right = next((a for a, b in zip(edge, edge[1:], strict=False) if b - a > 20), edge[-1])  # the colour bar is apart
    dashed = (band == 255).all(axis=-1).mean(axis=0)[: right - left]
    return {round(4 * i / (right - left), 1) for i in np.flatnonzero((dashed > 0.3) & (dashed < 0.9))}


def test_dashed_line_divides_trained_from_longer(tmp_path):
    without = draw(tmp_path, LINE_ROWS)[2]
    assert dashed_places(without) == set()
    for trained, place in ((2000, 2.0), (3999, 3.0)):
        assert dashed_places(draw(tmp_path, LINE_ROWS, trained_length=trained)[2]) == {place}
    for trained in (999, 4000):  # nothing to divide
        assert np.array_equal(draw(tmp_path, LINE_ROWS, trained_length=trained)[2], without)


def test_large_grids_keep_the_size(tmp_path):
    rows = [row(length, depth, 0.5) for length in range(1000, 129000, 1000) for depth in range(0, 101, 3)]
    assert draw(tmp_path, rows)[2].shape == (750, 1800, 3)


def test_nothing_to_draw(tmp_path):
    for rows in ([], [failed(1000, 0), {"_id": "y", "error": "no cell"}]):
        with pytest.raises(ValueError, match=f"no result to draw for t: none of {len(rows)} rows has a score"):
            write_heat_map(rows, tmp_path / "a.png", tmp_path / "a.csv", "t")
    assert not list(tmp_path.iterdir())
    assert draw(tmp_path, [*ROWS, {"_id": "y", "error": "no cell"}])[1].count("\n") == 4


def test_pyplot_stays_out(tmp_path):
    code = (
        "import sys; from pathlib import Path; from kvfactory.needle.heat_map import write_heat_map as w\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        f"row = dict(context_length=1, depth_percent=0, scores=dict(recall=1.0)); p = Path({str(tmp_path)!r})\n"
        "w([row], p / 'a.png', p / 'a.csv', 't'); assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
