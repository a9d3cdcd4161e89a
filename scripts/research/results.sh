#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Measure figures of docs/results.md again, keep what was measured as JSON beside this file, and write
# its tables into the page. NAME is an experiment, whose missing runs are run, or a measurement, which
# is called three times.
#     scripts/research/results.sh                  lists the names
#     scripts/research/results.sh caat --jobs 2    two runs at once
# Stop an experiment at any time: the same command goes on, also in another clone once the JSON is
# committed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/setup_env.sh
setup_env

name=${1:-}
experiment=scripts/research/experiments/$name.toml
status=0
if [ -f "$experiment" ]; then
    trap : INT # the runs end by themselves, and are kept
    "$RUN_PYTHON" -m scripts.research.finished_runs restore "$name" "outputs/$name"
    "$RUN_PYTHON" -m torchtitan_lr scaling run "$experiment" --out "outputs/$name" "${@:2}" ||
        status=$?
    "$RUN_PYTHON" -m scripts.research.finished_runs store "$name" "outputs/$name"
else
    "$RUN_PYTHON" -m scripts.research.measurements "$@"
    [ -n "$name" ] || exit 0
fi
"$RUN_PYTHON" -m scripts.research.result_tables "$name"
exit "$status"
