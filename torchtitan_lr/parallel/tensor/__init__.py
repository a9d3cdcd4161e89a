# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tensor parallelism by plans: BTP, vanilla, Megatron, CAAT-Net."""
