#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# The main job's short form on 4 ranks, GPUs if there are as many, else CPU processes: it must
# learn something in 20 steps.
# Arguments override the TOML, after the smoke's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/setup_env.sh
setup_env

dump_folder=$(mktemp -d "${TMPDIR:-/tmp}/torchtitan_lr_smoke.XXXXXX")
trap 'rm -rf "$dump_folder"' EXIT

NGPU= CONFIG_FILE=./train_configs/debug_cola.toml ./run_llama_train.sh \
    --job.dump_folder="$dump_folder" \
    --training.steps=20 \
    --lr_scheduler.warmup_steps=2 \
    --metrics.log_freq=5 \
    --validation.steps=2 \
    --checkpoint.interval=10 \
    "$@"

"$RUN_PYTHON" scripts/check_smoke.py "$dump_folder"
