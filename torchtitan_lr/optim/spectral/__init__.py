# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon, Spectron and LoRA-Muon, by Gram matrices on the side of the rank r."""
