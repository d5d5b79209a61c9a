"""Run LongBench with one or several KV-cache reduction methods; every result says what was really stored.

    python run_longbench.py --method snapkv --model_path smollm2 --data_dir data/sample --max_capacity_prompts 256
    python run_longbench.py --method fullkv,snapkv,pyramidkv --model_path meta-llama/Meta-Llama-3-8B-Instruct \
        --datasets narrativeqa,qasper --max_capacity_prompts 128,2048 --kv_cache_granularity kv_head
    python run_longbench.py --list_methods

Results go to {save_dir}/{model}_{budget}/{dataset}/{Method[+suffix]}.json; the same command run again goes on where it
was stopped. Exit codes: 0 all examples done, 1 some failed (each is recorded), 2 refused before the run (one sentence
says why, nothing is written), 75 stopped by SIGTERM or SIGINT after writing what was done.
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
    from kvfactory.suites.longbench import LongBenchSettings

    return run(LongBenchSettings, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
