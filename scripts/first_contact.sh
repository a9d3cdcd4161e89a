#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# For the first machine with 2 to 8 GPUs: what several GPUs do here, as one page, in ten minutes.
#   ./scripts/first_contact.sh [--out FOLDER]          needs all GPUs of the machine
#   ./scripts/first_contact.sh --small                 a rehearsal on four CPU processes
# Losses of every layout beside one GPU's, bytes beside the formulas, bandwidths as a hardware file,
# the share of communication that computation hides, and a run that resumes in another layout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/setup_env.sh
setup_env
exec "$RUN_PYTHON" -m scripts.first_contact "$@"
