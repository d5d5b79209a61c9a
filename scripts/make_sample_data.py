"""Write the bundled sample suite: `python scripts/make_sample_data.py [--out data/sample] [--check]`.

The output depends on nothing but the code in `scripts/sample_data/`: no clock, no network, standard library only.
`--check` writes nothing and ends with 1 when a file in the folder differs from what would be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sample_data import suite  # noqa: E402
from sample_data.record import as_lines  # noqa: E402

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "data" / "sample"


def stale_files(out: Path, files: dict[str, bytes]) -> list[str]:
    """One sentence for each file of `out` that is missing, different, or not part of the suite."""
    found = []
    for name, content in files.items():
        path = out / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.read_bytes() != content:
            found.append(f"{path} differs from what the script makes")
    return found + [
        f"{path} is not part of the suite" for path in sorted(out.glob("*.jsonl")) if path.name not in files
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; the exit code."""
    parser = argparse.ArgumentParser(description="Write the bundled sample suite.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the JSON Lines files")
    parser.add_argument("--check", action="store_true", help="write nothing, end with 1 if the folder is stale")
    options = parser.parse_args(arguments)
    files = {f"{name}.jsonl": as_lines(records) for name, records in suite().items()}
    if options.check:
        problems = stale_files(options.out, files)
        for problem in problems:
            print(f"{problem}; run scripts/make_sample_data.py", file=sys.stderr)
        return 1 if problems else 0
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (options.out / name).write_bytes(content)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
