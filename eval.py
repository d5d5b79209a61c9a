"""Score result files again and write their tables; no torch and no model needed.

    python eval.py --results_dir results_long_bench/model_512     one run folder
    python eval.py --results_dir results_long_bench               every run folder in it, and all together
    python eval.py compare A B                                    two result files, or two run folders

Reads what `run_longbench.py` writes and what KVCache-Factory wrote: `{dataset}/{Method}.json`, JSON Lines. Writes
results.md, results.csv and results.json into each folder. Exit code 0, or 2 with one sentence for what cannot be read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvfactory.reports.eval_compare import compare_paths, format_comparison
from kvfactory.reports.eval_files import find_runs
from kvfactory.reports.eval_output import to_markdown, write_results
from kvfactory.reports.eval_tables import join_tables, score_run
from kvfactory.streams import outlive_readers


def evaluate(arguments: argparse.Namespace) -> None:
    """`--results_dir`: score, print, write."""
    runs = find_runs(arguments.results_dir)
    # A terminal gets blocks of columns that fit; a pipe or a file gets whole lines.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    tables = [score_run(run, arguments.errors_as_zero, arguments.extra_metrics) for run in runs]
    folders = [run.path for run in runs]
    root = Path(arguments.results_dir)
    if folders != [root]:
        tables.append(join_tables(root.resolve().name, tables))
        folders.append(root)
    for i, (table, folder) in enumerate(zip(tables, folders, strict=True)):
        write_results(table, folder)
        if i < len(runs) or len(runs) > 1:  # one run and "all together" are the same table
            print(to_markdown(table, width), end="\n\n")
    print(f"Written: {', '.join(str(folder / 'results.{md,csv,json}') for folder in folders)}")


def compare(arguments: argparse.Namespace) -> None:
    """`compare A B`: print."""
    print(format_comparison(compare_paths(arguments.a, arguments.b), arguments.a, arguments.b))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    if argv[:1] == ["compare"]:
        parser = argparse.ArgumentParser(prog="eval.py compare", description="Compare B with A, example by example.")
        parser.add_argument("a", metavar="A", help="result file, or run folder")
        parser.add_argument("b", metavar="B", help="result file, or run folder")
        parser.set_defaults(action=compare)
        return parser.parse_args(argv[1:])
    parser = argparse.ArgumentParser(
        prog="eval.py",
        description="Score result files again and write results.md, results.csv and results.json beside them.",
        epilog="eval.py compare A B compares two result files or two run folders.",
    )
    parser.add_argument("--results_dir", required=True, help="run folder {save_dir}/{model}_{budget}, or save_dir")
    parser.add_argument("--errors_as_zero", action="store_true", help="count failed examples as 0 (default: left out)")
    parser.add_argument(
        "--extra_metrics", action="store_true", help="also rouge-score's ROUGE-L and classification without the skip"
    )
    parser.set_defaults(action=evaluate)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(list(sys.argv[1:] if argv is None else argv))
    try:
        arguments.action(arguments)
    except (ValueError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
