# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Experiments: grids of runs, families of models over their sizes, and the fits of their losses."""
