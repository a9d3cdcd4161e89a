# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Optimizers: TSR-Adam, Muon, Spectron and LoRA-Muon; torch's Adam and AdamW on local shards."""
