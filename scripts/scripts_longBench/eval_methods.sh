#!/usr/bin/env bash
# Several methods and budgets on LongBench with one model load, in the argument order of KVCache-Factory's script.
set -euo pipefail

usage() {
    cat >&2 <<'TEXT'
usage: bash scripts/scripts_longBench/eval_methods.sh CUDA_VISIBLE_DEVICES methods max_capacity_prompts attn_implementation source_path model_path
  methods               names separated by commas; METHODS in the environment takes their place
  max_capacity_prompts  kept prompt tokens per head, several separated by commas, or all: 64 96 128 256 512 1024 2048 4096
  the others            as in eval.sh
environment: METHODS, DATA_DIR (folder of the data), PYTHON (interpreter, default python3)
TEXT
    exit 2
}

if [ "$#" -ne 6 ]; then
    echo "eval_methods.sh: 6 arguments are needed, $# were given" >&2
    usage
fi
methods="${METHODS:-$2}"
budgets="$3"
if [ "$budgets" = all ]; then budgets=64,96,128,256,512,1024,2048,4096; fi
if [ -z "$methods" ]; then
    echo "eval_methods.sh: methods (argument 2) is empty and METHODS is not set" >&2
    usage
fi
if ! [[ "$budgets" =~ ^(-1|[0-9]+(,[0-9]+)*)$ ]]; then
    echo "eval_methods.sh: max_capacity_prompts '$3' (argument 3) is neither numbers of tokens nor all" >&2
    usage
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/eval.sh" "$1" "$methods" "$budgets" "$4" "$5" "$6"
