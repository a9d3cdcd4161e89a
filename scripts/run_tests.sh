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

results=$(mktemp -d)
lane=
end() {
    if [ -n "$lane" ]; then
        kill -TERM -- "-$lane" 2>/dev/null
        cat "$results/lane"
    fi
    rm -rf "$results"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# stage NAME MODULE ARGS...
stage() {
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n==== %s\n' "$name"
    "$RUN_PYTHON" -m "$@" || status=$?
    printf '==== %s: %s, %d s\n' "$name" "$([ $status -eq 0 ] && echo passed || echo FAILED)" \
        $((SECONDS - begin))
    [ $status -eq 0 ] || echo "$name" >>"$results/failed"
}

style() {
    stage "ruff check" ruff check .
    stage "ruff format --check" ruff format --check .
    stage "mypy" mypy
}

# Everything, in two lanes side by side: ranks often wait for one another, and then leave the cores
# to the other lane. Its output comes when both have ended.
everything() {
    echo "Style, units and whole runs go on beside the ranks; their output comes at the end."
    set -m # a process group of its own, which ends with this script
    {
        style
        stage "units" pytest tests/unit tests/gpu -n auto --dist worksteal "$@"
        stage "whole runs" pytest tests/integration --durations=10 "$@"
    } >"$results/lane" 2>&1 &
    lane=$!
    set +m
    stage "ranks" pytest tests/distributed --durations=15 "$@"
    wait "$lane"
    lane=
    cat "$results/lane"
}

case ${1:-} in
    --quick)
        style
        mapfile -t changed < <("$RUN_PYTHON" scripts/check/changed_tests.py)
        stage "units of what changed" pytest "${changed[@]}" -n auto --dist worksteal
        stage "one whole run" pytest tests/integration/test_finished_run.py
        ;;
    --full)
        everything --full
        stage "mutants" scripts.check.mutants
        ;;
    "")
        everything
        ;;
    *)
        style
        stage "pytest" pytest "$@"
        ;;
esac

echo
if [ -s "$results/failed" ]; then
    printf '==== FAILED after %d s:' "$SECONDS"
    printf ' [%s]' "$(paste -sd, "$results/failed" | sed 's/,/] [/g')"
    echo
    exit 1
fi
echo "==== all passed in $SECONDS s"
