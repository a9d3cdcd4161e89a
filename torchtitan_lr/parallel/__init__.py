# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Everything that distributes a model before training; independent of the trainer.

`parallelize` has the order of all steps, `btp` the table of what BTP sends, `plan_parts` how the
gradients of replicated parameters are summed, `checkpoint_modes` what backward computes again.
"""
