"""Run RULER with one or several KV-cache reduction methods.

    python run_ruler.py --method fullkv,snapkv --model_path smollm2 --lengths 1024,4096 --tasks niah_single_1,vt \
        --num_samples 20 --max_capacity_prompts 256 --kv_cache_granularity kv_head
    python run_ruler.py --method snapkv --model_path MODEL --lengths 4096,16384 --data_dir data/RULER

Samples are generated with the tokenizer of the model and kept in the cache, or read from
{data_dir}/{length}/{task}.jsonl. Results go to {save_dir}/{model}_{budget}/{length}/{task}/{Method[+suffix]}.json;
`python eval_ruler.py` makes the table. Everything else is as in run_longbench.py, exit codes included.
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
    from kvfactory.suites.ruler import RulerSettings

    return run(RulerSettings, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
