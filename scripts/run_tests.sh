#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Style, types and tests. Every stage runs, whatever failed before it; the exit status is 1 if one
# failed, and the last lines name it.
#   ./scripts/run_tests.sh           all of it; of the largest matrices the share of this commit
#   ./scripts/run_tests.sh --quick   style, types, the units of what changed, one whole run
#   ./scripts/run_tests.sh --full    the whole matrices and all mutants: for the night
#   ./scripts/run_tests.sh ARGS ...  style and types, then pytest with these arguments
# docs/testing.md has the times, and what is where.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/setup_env.sh
setup_env dev
export OMP_NUM_THREADS=1

failed=()

# stage NAME MODULE ARGS...
stage() {
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n==== %s\n' "$name"
    "$RUN_PYTHON" -m "$@" || status=$?
    printf '==== %s: %s, %d s\n' "$name" "$([ $status -eq 0 ] && echo passed || echo FAILED)" \
        $((SECONDS - begin))
    [ $status -eq 0 ] || failed+=("$name")
}

units=(tests/unit tests/gpu -n auto --dist worksteal)
runs=(tests/distributed tests/integration --durations=15)

stage "ruff check" ruff check .
stage "ruff format --check" ruff format --check .
stage "mypy" mypy
case ${1:-} in
    --quick)
        mapfile -t changed < <("$RUN_PYTHON" scripts/check/changed_tests.py)
        stage "units of what changed" pytest "${changed[@]}" -n auto --dist worksteal
        stage "one whole run" pytest tests/integration/test_finished_run.py
        ;;
    --full)
        stage "units" pytest "${units[@]}" --full
        stage "ranks and whole runs" pytest "${runs[@]}" --full
        stage "mutants" scripts.check.mutants
        ;;
    "")
        stage "units" pytest "${units[@]}"
        stage "ranks and whole runs" pytest "${runs[@]}"
        ;;
    *)
        stage "pytest" pytest "$@"
        ;;
esac

echo
if [ ${#failed[@]} -gt 0 ]; then
    printf '==== FAILED after %d s:' "$SECONDS"
    printf ' [%s]' "${failed[@]}"
    echo
    exit 1
fi
echo "==== all passed in $SECONDS s"
