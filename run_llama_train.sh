#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# Train the model of CONFIG_FILE on NGPU ranks; set up .venv first if needed.
# Without arguments: the main job, train_configs/debug_cola.toml on the GPUs of this machine, at most
# 4, or on 4 CPU processes without GPUs. --help lists all settings.
#   NGPU=8 CONFIG_FILE=train_configs/cola_60m.toml ./run_llama_train.sh --training.steps=100
#   ./run_llama_train.sh cola_60m --training.steps=100    # a file of train_configs/ by its name
#   COMM_MODE=fake_backend NGPU=64 ./run_llama_train.sh   # dry run of one step, no GPU
set -euo pipefail

# Resolve a relative CONFIG_FILE before changing the directory.
if [ -n "${CONFIG_FILE:-}" ] && [ -f "$CONFIG_FILE" ]; then
    CONFIG_FILE=$(cd "$(dirname "$CONFIG_FILE")" && pwd)/$(basename "$CONFIG_FILE")
fi
# So too a file as the first argument.
if [ -n "${1:-}" ] && [ -f "$1" ]; then
    set -- "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" "${@:2}"
fi
# Relative paths of data are relative to this folder.
export TORCHTITAN_LR_CALLER=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"

export CONFIG_FILE=${CONFIG_FILE:-./train_configs/debug_cola.toml}
export LOG_RANK=${LOG_RANK:-0}
export COMM_MODE=${COMM_MODE:-}

. scripts/setup_env.sh
setup_env
exec "$RUN_PYTHON" -m torchtitan_lr train "$@"
