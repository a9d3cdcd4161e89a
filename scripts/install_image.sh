#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# The steps of scripts/Dockerfile, in any copy of the repository: .venv with all requirements, and
# two steps of training as a check. TORCH, such as "torch==2.13.0", narrows pyproject.toml's range.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"${PYTHON:-python3}" -m venv .venv
# torch with its CUDA libraries: where an image is built there is no GPU, where it runs there is.
.venv/bin/python -m pip install --quiet --disable-pip-version-check ${TORCH:+"$TORCH"} -e .
.venv/bin/python scripts/check_env.py

check=$(mktemp -d)
trap 'rm -rf "$check"' EXIT
NGPU=1 ./run_llama_train.sh --job.dump_folder="$check" --training.steps=2 --lr_scheduler.warmup_steps=1 \
    --validation.no_enable --checkpoint.no_enable --metrics.no_enable_tensorboard
