"""Score RULER result files again and write their tables; no torch and no model needed.

    python eval_ruler.py --results_dir results_ruler/model_512          one run folder, all its lengths
    python eval_ruler.py --results_dir results_ruler/model_512/4096     one length of it
    python eval_ruler.py --results_dir results_ruler                    every run folder in it, and all together

Reads what `run_ruler.py` writes and what KVCache-Factory wrote: `{length}/{task}/{Method}.json`, JSON Lines. Writes
results.md, results.csv and results.json into each folder. Exit code 0, or 2 with one sentence for what cannot be read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvfactory.reports.eval_output import write_reports
from kvfactory.reports.eval_tables import join_tables
from kvfactory.reports.ruler_files import find_ruler_runs
from kvfactory.reports.ruler_output import to_csv, to_dict, to_markdown
from kvfactory.reports.ruler_tables import score_ruler_run
from kvfactory.streams import outlive_readers


def evaluate(results_dir: str, errors_as_zero: bool) -> None:
    """Score, write, print."""
    runs = find_ruler_runs(results_dir)
    # A terminal gets blocks of columns that fit; a pipe or a file gets whole lines.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    root = Path(results_dir)
    tables = [(score_ruler_run(run, errors_as_zero), run.path) for run in runs]
    if runs[0].path != root:
        tables.append((join_tables(root.resolve().name, [table for table, _ in tables]), root))
    for i, (table, folder) in enumerate(tables):
        write_reports(folder, to_csv(table), to_markdown(table), to_dict(table))
        if i < len(runs) or len(runs) > 1:  # one run and "all together" are the same table
            print(to_markdown(table, width), end="\n\n")
    print(f"Written: {', '.join(str(folder / 'results.{md,csv,json}') for _, folder in tables)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="eval_ruler.py",
        description="Score RULER result files again and write results.md, results.csv and results.json beside them.",
    )
    where = "run folder {save_dir}/{model}_{budget}, the folder of one length in it, or save_dir"
    parser.add_argument("--results_dir", required=True, help=where)
    parser.add_argument("--errors_as_zero", action="store_true", help="count failed examples as 0 (default: left out)")
    arguments = parser.parse_args(argv)
    try:
        evaluate(arguments.results_dir, arguments.errors_as_zero)
    except (ValueError, OSError) as error:
        print(f"eval_ruler.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
