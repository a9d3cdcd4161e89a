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
stage "pytest" pytest "$@"
echo
echo "==== all passed"
