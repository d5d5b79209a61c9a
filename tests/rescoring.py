"""Result files for the scorers eval.py and eval_ruler.py, and what they make of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def write(path: Path, rows: list[dict], end: str = "") -> Path:
    """Writes rows as JSON Lines, and `end` behind them as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows) + end
    path.write_bytes(text.encode("utf-8"))
    return path


def read_json(folder: Path) -> dict[str, Any]:
    """results.json, which must be JSON by the standard: no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"results.json holds {name}")

    return json.loads((folder / "results.json").read_text(encoding="utf-8"), parse_constant=refuse)


def score_without_torch(program: str, folder: Path) -> None:
    """Runs `{program} --results_dir {folder}` where torch and transformers cannot be imported."""
    body = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.argv = [{program!r}, '--results_dir', {str(folder)!r}]\n"
        f"runpy.run_path({str(ROOT / program)!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
