# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A mode of activation checkpointing from outside the package: ``feed_forward``.

The second half of every block runs again in backward, attention does not. A run names this module
by ``experimental.custom_import``.
"""

import torchtitan_lr.training.register  # noqa: F401  # the models, as the default module does
from torchtitan_lr.compat.autograd import checkpoint_wrapper
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.parallel.recompute.activation_checkpoint import (
    CheckpointingMode,
    compiles_model,
    register_mode,
)


class FeedForwardCheckpointing(CheckpointingMode):
    name = "feed_forward"

    def check(self, config):
        if compiles_model(config):
            raise ConfigError("compile.enable", True, f"false with the mode {self.name}")

    def apply(self, model, job_config):
        section = job_config.activation_checkpoint
        for block in model.layers.values():
            block.feed_forward = checkpoint_wrapper(
                block.feed_forward, preserve_rng_state=section.preserve_rng_state
            )

    def repeated_flops(self, section, block):
        return block.feed_forward


register_mode(FeedForwardCheckpointing())
