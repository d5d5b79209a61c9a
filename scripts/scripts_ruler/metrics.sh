#!/usr/bin/env bash
# Scores the result files of a RULER run again: bash scripts/scripts_ruler/metrics.sh RESULTS_DIR
set -euo pipefail
if [ "$#" -ne 1 ]; then
    echo "usage: bash scripts/scripts_ruler/metrics.sh RESULTS_DIR" >&2
    exit 2
fi
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/../../eval_ruler.py" --results_dir "$1"
