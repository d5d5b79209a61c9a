#!/usr/bin/env bash
# Makes a virtual environment with kvfactory and the versions that CI tests. A second call finds it done and needs no
# network.
#
#   scripts/setup_env.sh [FOLDER [OVERRIDES]]     default: .venv; OVERRIDES: constraints that replace those of
#                                                 constraints.txt for the same packages
#
# PYTHON      the interpreter to start from (default: python3)
# TORCH_ARGS  further arguments for installing torch, e.g. an index that carries the build you want; without it a
#             machine that has no NVIDIA GPU asks for the CPU build first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv}
overrides=${2:-}
python=${PYTHON:-python3}

# Contents, not times: a checkout gives files new times and must not start an install.
wanted=$(cat pyproject.toml requirements.txt constraints.txt scripts/setup_env.sh ${overrides:+"$overrides"} | cksum)
wanted="$wanted $(pwd) ${TORCH_ARGS:-}"
if [ "$(cat "$venv/installed" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "setup: $python is $("$python" --version 2>&1), and kvfactory needs Python 3.10 or newer (PYTHON=... names another)" >&2
    exit 2
fi
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

constraints="$venv/constraints.txt"
if [ -n "$overrides" ]; then
    replaced=$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' "$overrides" | paste -s -d '|')
    { grep -viE "^($replaced)==" constraints.txt; cat "$overrides"; } >"$constraints"
else
    cp constraints.txt "$constraints"
fi

# torch first and by exact version: left to the rest, a range would take whatever build is newest, CUDA and all.
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$constraints")
if [ -n "${TORCH_ARGS:-}" ]; then
    # shellcheck disable=SC2086  # several arguments are meant
    "${pip[@]}" install --quiet $TORCH_ARGS "torch==$torch"
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1 &&
    "${pip[@]}" install --quiet "torch==$torch+cpu" 2>/dev/null; then
    echo "setup: no NVIDIA GPU, torch $torch as CPU build"
else
    if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
        echo "setup: no NVIDIA GPU, but no CPU build of torch $torch in the package index; taking the standard build," \
            "which may be gigabytes (TORCH_ARGS='--index-url ...' names another index)" >&2
    fi
    "${pip[@]}" install --quiet "torch==$torch"
fi
"${pip[@]}" install --quiet --constraint "$constraints" --editable '.[dev]'
echo "$wanted" >"$venv/installed"
echo "setup: $venv is ready"
