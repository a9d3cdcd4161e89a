#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Smoke test: the main job for 20 steps on the GPUs of this machine, at most 4, or on 4 CPU processes
# without GPUs. The batches are the same on any number of GPUs. The losses must fall below that of uniform predictions. Arguments override the TOML and the
# settings below.
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
