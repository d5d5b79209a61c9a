#!/usr/bin/env bash
# One method under one budget on LongBench, with the positional arguments of KVCache-Factory's script of this name.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage() {
    echo "usage: bash $0 $six [merge [quant_method [nbits]]]" >&2
    explain results_long_bench
    cat >&2 <<'TEXT'
  merge, quant_method   none or "" for neither; nbits is used with a quantiser only
environment: DATA_DIR (folder of the data), PYTHON (interpreter, default python3)
TEXT
    exit 2
}

check 9 "$@"
options+=(--save_dir "${5}results_long_bench" --use_cache True)
if given "${7:-}"; then options+=(--merge "$7"); fi
add_quantiser "${@:8}"
data="${DATA_DIR:-}"
if [ -z "$data" ] && [ ! -d data/LongBench ] && [ -d "$root/data/LongBench" ]; then data="$root/data/LongBench"; fi
if [ -n "$data" ]; then options+=(--data_dir "$data"); fi
start run_longbench.py
