"""Run needle in a haystack with one or several KV-cache reduction methods, and draw the heat map.

    python run_needle_in_haystack.py --method fullkv,snapkv --model_path smollm2 --s_len 1000 --e_len 4000 --step 1000 \
        --max_capacity_prompts 128 --kv_cache_granularity kv_head

Results go to {save_dir}/{model}_{budget}/needle/{Method[+suffix]}.json, one line per cell, with the heat map beside
them as .png and .csv. Everything else is as in run_longbench.py, exit codes included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvfactory.streams import outlive_readers

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one call."""
    from kvfactory.main import run
    from kvfactory.suites.needle import NeedleSettings

    return run(NeedleSettings, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
