# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What an export for transformers consists of.

``configuration_torchtitan_lr.py`` and ``modeling_torchtitan_lr.py`` are copied beside the weights
and run without this package; all other files of this folder write exports and read folders.
"""
