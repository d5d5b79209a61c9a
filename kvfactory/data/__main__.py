"""`python -m kvfactory.data download`: fetch LongBench's records and prompt texts into the download cache."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from kvfactory.data.download import CONFIG_URL, download, is_complete
from kvfactory.data.longbench import longbench_cache


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 everything is in the cache, 2 refused or not reachable (one sentence says why)."""
    parser = argparse.ArgumentParser(prog="python -m kvfactory.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("download", help="download LongBench once; a second call does nothing")
    fetch.add_argument("--cache_dir", type=Path, help="cache root (default: $KVFACTORY_CACHE or ~/.cache/kvfactory)")
    fetch.add_argument("--hub_url", help="another hub end point (default: huggingface_hub's, or $HF_ENDPOINT)")
    fetch.add_argument("--config_url", help=f"base address of the two prompt files (default: {CONFIG_URL})")
    args = parser.parse_args(argv)
    target = longbench_cache() if args.cache_dir is None else args.cache_dir.expanduser() / "LongBench"
    if is_complete(target):
        print(f"LongBench is already at {target}")
        return 0
    try:
        print(f"LongBench is now at {download(args.cache_dir, args.hub_url, args.config_url)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.cache_dir is not None:
        print(f"The runner finds it with --data_dir {target}, or with KVFACTORY_CACHE={args.cache_dir}.")
    return 0


if __name__ == "__main__":
    # An exit through SystemExit removes the scratch folder; the default action of the signal would not.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
