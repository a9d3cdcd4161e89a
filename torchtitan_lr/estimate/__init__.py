# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimate a run's memory, traffic and time from its configuration, by `formulas`."""
