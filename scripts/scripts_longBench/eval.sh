#!/usr/bin/env bash
# One method under one budget on LongBench, with the positional arguments of KVCache-Factory's script of this name.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: bash scripts/scripts_longBench/eval.sh CUDA_VISIBLE_DEVICES method max_capacity_prompts attn_implementation source_path model_path [merge [quant_method [nbits]]]
  CUDA_VISIBLE_DEVICES  device numbers such as 0 or 0,1; "" runs on the CPU
  method                e.g. snapkv; several separated by commas share one model load
  max_capacity_prompts  kept prompt tokens per head, or several separated by commas; -1 is the default of 512
  attn_implementation   auto, eager, sdpa, flash_attention_2 or flash_attention_3
  source_path           prefix of the result folder: results go to ${source_path}results_long_bench
  model_path            local folder, hub id, or smollm2
  merge, quant_method   none or "" for neither; nbits is used with a quantiser only
environment: DATA_DIR (folder of the data), PYTHON (interpreter, default python3)
TEXT
    exit 2
}

refuse() {
    echo "eval.sh: $1" >&2
    usage
}

[ "$#" -ge 6 ] && [ "$#" -le 9 ] || refuse "6 to 9 arguments are needed, $# were given"
[[ "$1" =~ ^(-1|[0-9]+(,[0-9]+)*|(GPU|MIG)-.+)?$ ]] || refuse "CUDA_VISIBLE_DEVICES '$1' (argument 1) is no list of device numbers"
[ -n "$2" ] || refuse "method (argument 2) is empty"
[[ "$3" =~ ^(-1|[0-9]+(,[0-9]+)*)$ ]] || refuse "max_capacity_prompts '$3' (argument 3) is no number of tokens"
[[ "$4" =~ ^(auto|eager|sdpa|flash_attention_[23])$ ]] || refuse "attn_implementation '$4' (argument 4) is unknown"
[ -n "$6" ] || refuse "model_path (argument 6) is empty"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export CUDA_VISIBLE_DEVICES="$1"
options=(--method "$2" --max_capacity_prompts "$3" --attn_implementation "$4" --model_path "$6")
options+=(--save_dir "${5}results_long_bench" --use_cache True)

given() {
    case "${1,,}" in
        "" | none) return 1 ;;
        *) return 0 ;;
    esac
}
if given "${7:-}"; then options+=(--merge "$7"); fi
if given "${8:-}"; then
    options+=(--quant_method "$8")
    if given "${9:-}"; then options+=(--nbits "$9"); fi
fi
data="${DATA_DIR:-}"
if [ -z "$data" ] && [ ! -d data/LongBench ] && [ -d "$root/data/LongBench" ]; then data="$root/data/LongBench"; fi
if [ -n "$data" ]; then options+=(--data_dir "$data"); fi
exec "${PYTHON:-python3}" "$root/run_longbench.py" "${options[@]}"
