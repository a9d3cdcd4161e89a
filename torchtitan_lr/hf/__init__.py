# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What an export for transformers consists of.

``modeling_torchtitan_lr.py`` is copied beside the weights and runs without this package; all other
files of this folder write exports and read folders.
"""
