#!/usr/bin/env bash
# Several methods and budgets on RULER with one model load, in the argument order of KVCache-Factory's script.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
sweep "$(dirname "${BASH_SOURCE[0]}")/eval.sh" "$@"
