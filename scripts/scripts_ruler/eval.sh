#!/usr/bin/env bash
# One method under one budget on RULER, with the positional arguments of KVCache-Factory's script of this name.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage() {
    echo "usage: bash $0 $six [quant_method [nbits]]" >&2
    explain results_ruler
    cat >&2 <<'TEXT'
  quant_method          none or "" for none; nbits is used with a quantiser only
environment: DATA_DIR (folder of {length}/{task}.jsonl; generated without it), LENGTHS (tokens, such as 4096,8192; the
  runner's default without it), PYTHON (interpreter, default python3)
TEXT
    exit 2
}

check 8 "$@"
options+=(--save_dir "${5}results_ruler" --use_cache True)
add_quantiser "${@:7}"
if [ -n "${LENGTHS:-}" ]; then options+=(--lengths "$LENGTHS"); fi
if [ -n "${DATA_DIR:-}" ]; then options+=(--data_dir "$DATA_DIR"); fi
start run_ruler.py
