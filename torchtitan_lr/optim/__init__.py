# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Optimizers: TSR-Adam, spectral ones, Adam and AdamW on local shards."""
