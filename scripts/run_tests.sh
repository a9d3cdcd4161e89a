#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Style, types and tests. Every stage runs, even after a failure; the exit status is 1 if a stage
# failed, and the last lines name it.
#   ./scripts/run_tests.sh           one test of each kind
#   ./scripts/run_tests.sh --full    the whole matrices and all mutants: for nightly runs
#   ./scripts/run_tests.sh ARGS ...  style and types, then pytest with these arguments
# docs/contributing.md lists the limits and the layout of the tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/setup_env.sh
setup_env dev
export OMP_NUM_THREADS=1
# Dozens of processes import torch. Python keeps what it has compiled; else each compiles for 20 s.
unset PYTHONDONTWRITEBYTECODE

results=$(mktemp -d)
background=
end() {
    local job
    for job in $background; do
        kill -TERM -- "-$job" 2>/dev/null
    done
    [ -z "$background" ] || cat "$results"/output-*
    rm -rf "$results"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# stage NAME MODULE ARGS..., with $PRIORITY before it
stage() {
    local name=$1 begin=$SECONDS status=0
    shift
    printf '\n==== %s\n' "$name"
    ${PRIORITY:-} "$RUN_PYTHON" -m "$@" || status=$?
    printf '==== %s: %s, %d s\n' "$name" "$([ $status -eq 0 ] && echo passed || echo FAILED)" \
        $((SECONDS - begin))
    [ $status -eq 0 ] || echo "$name" >>"$results/failed"
}

style() {
    stage "ruff check" ruff check .
    stage "ruff format --check" ruff format --check .
}

# in_background STAGE...: runs a stage, whose output comes at the end.
in_background() {
    set -m # gives it its own process group, so that this script can end it
    stage "$@" >"$results/output-$1" 2>&1 &
    set +m
    background="$background $!"
}

# Everything, in three parallel jobs. Ranks and whole runs often wait for processes, and then leave
# the cores to the unit tests, which have a lower priority.
everything() {
    "$RUN_PYTHON" -c "import torchtitan_lr.train" & # compiled once, before several do it at a time
    style
    wait $!
    echo "Unit tests and training runs run in the background; their output comes at the end."
    in_background "whole runs" pytest tests/integration --durations=10 "$@"
    PRIORITY="nice -n 5" in_background "units" pytest tests/unit tests/gpu -n auto \
        --dist worksteal --durations=10 "$@"
    stage "mypy" mypy
    stage "ranks" pytest tests/distributed --durations=15 "$@"
    wait $background
    background=
    cat "$results"/output-*
}

case ${1:-} in
    --full)
        # One of these tests has hundreds of cases.
        everything --full -o timeout=3600 -o faulthandler_timeout=3900
        stage "mutants" tests.mutants
        ;;
    "")
        everything
        ;;
    *)
        style
        stage "mypy" mypy
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
