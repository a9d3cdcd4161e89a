#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Measure figures of docs/results.md again: run what is missing of an experiment, keep its runs as
# JSON beside its TOML file, and write its tables into the page (or print them).
#     scripts/research/results.sh                  lists the experiments
#     scripts/research/results.sh caat --jobs 2    two runs at once
# Stop an experiment at any time: the same command goes on, also in another clone once the JSON is
# committed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

name=${1:-}
experiment=scripts/research/experiments/$name.toml
if [ ! -f "$experiment" ]; then
    names=$(basename -s .toml scripts/research/experiments/*.toml)
    [ -n "$name" ] || { echo "$names" && exit 0; }
    echo "error: NAME: got '$name', expected one of ${names//$'\n'/, }" >&2
    exit 2
fi
. scripts/setup_env.sh
setup_env
status=0
trap : INT # the runs end by themselves, and are kept
"$RUN_PYTHON" -m scripts.research.finished_runs begin "$name" "outputs/$name"
"$RUN_PYTHON" -m torchtitan_lr scaling run "$experiment" --out "outputs/$name" "${@:2}" || status=$?
"$RUN_PYTHON" -m scripts.research.finished_runs store "$name" "outputs/$name"
"$RUN_PYTHON" -m scripts.research.result_tables "$name"
exit "$status"
