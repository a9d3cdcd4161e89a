# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Activation checkpointing by its mode alone."""

from types import SimpleNamespace

from torchtitan_lr.parallel.checkpoint_modes import apply_activation_checkpoint
from torchtitan_lr.titan.base import ActivationCheckpoint


def checkpointing(mode):
    name, _, option = mode.partition(" ")
    section = ActivationCheckpoint(mode=name, preserve_rng_state=False)
    section.selective_ac_option = option or "2"
    section.low_rank_save_attention = False
    section.keep_inputs = "on" if option == "kept" else "off"
    config = SimpleNamespace(
        activation_checkpoint=section,
        compile=SimpleNamespace(enable=False, components=[]),
        job=SimpleNamespace(dump_folder=""),
    )
    return lambda model: apply_activation_checkpoint(model, config)
