#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Style, types and all tests, in this order; stops at the first that fails.
# Arguments go to pytest: ./scripts/run_tests.sh tests/unit -k launch
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/setup_env.sh
setup_env dev
export OMP_NUM_THREADS=1

stage() {
    echo
    echo "==== $1"
    shift
    "$RUN_PYTHON" -m "$@"
}

stage "ruff check" ruff check .
stage "ruff format --check" ruff format --check .
stage "mypy" mypy
if [ $# -gt 0 ]; then
    stage "pytest" pytest "$@"
else
    # One process a core: a unit test needs no more. The others start ranks enough by themselves.
    stage "pytest: units" pytest tests/unit tests/gpu -n auto --dist worksteal
    stage "pytest: ranks and whole runs" pytest tests/distributed tests/integration --durations=20
fi
echo
echo "==== all passed"
