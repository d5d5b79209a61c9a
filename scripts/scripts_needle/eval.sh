#!/usr/bin/env bash
# One method under one budget on the needle in a haystack. KVCache-Factory's script of this name has method, budget and
# attention as variables in its text; here they are arguments, in the order of the other benchmarks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

usage() {
    echo "usage: bash $0 $six [s_len [e_len [step]]]" >&2
    explain results_needle
    cat >&2 <<'TEXT'
  s_len, e_len, step    shortest and longest haystack and their distance, in tokens; "" for the runner's default
environment: PYTHON (interpreter, default python3)
TEXT
    exit 2
}

check 9 "$@"
options+=(--save_dir "${5}results_needle")
number=7
for flag in s_len e_len step; do
    value="${!number:-}"
    [[ "$value" =~ ^([1-9][0-9]*)?$ ]] || refuse "$flag '$value' (argument $number) is no number of tokens"
    if [ -n "$value" ]; then options+=("--$flag" "$value"); fi
    number=$((number + 1))
done
start run_needle_in_haystack.py
