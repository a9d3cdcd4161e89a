# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The trainer, and what it does beside the model: checkpoints, metrics, validation."""
