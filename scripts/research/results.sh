#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Measure figures of docs/results.md again: run what is missing of an experiment, keep its finished
# runs in scripts/research/experiments/NAME.json, and write its tables into the page.
#     scripts/research/results.sh                  lists the names
#     scripts/research/results.sh caat --jobs 2    two runs at once
# Stop it at any time: the same command goes on, also in another clone once the JSON is committed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
experiments=scripts/research/experiments

name=${1:-}
if [ ! -f "$experiments/$name.toml" ]; then
    [ -z "$name" ] || echo "error: NAME: got $name, expected one of these" >&2
    for file in "$experiments"/*.toml; do
        basename "$file" .toml
    done
    [ -z "$name" ] || exit 2
    exit 0
fi
shift

. scripts/setup_env.sh
setup_env
trap : INT # the runs end by themselves, and are kept below
"$RUN_PYTHON" -m scripts.research.finished_runs restore "$name" "outputs/$name"
status=0
"$RUN_PYTHON" -m torchtitan_lr scaling run "$experiments/$name.toml" \
    --out "outputs/$name" "$@" || status=$?
"$RUN_PYTHON" -m scripts.research.finished_runs store "$name" "outputs/$name"
"$RUN_PYTHON" -m scripts.research.result_tables
exit "$status"
