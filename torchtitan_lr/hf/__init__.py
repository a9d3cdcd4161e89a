# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exports for transformers, imports, generation; the file with the model's code runs alone."""
