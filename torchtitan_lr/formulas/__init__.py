# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Closed formulas: parameters, FLOPs, bytes sent, bytes held. They import no runtime code."""
