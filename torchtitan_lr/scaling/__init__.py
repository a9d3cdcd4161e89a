# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Scaling experiments: plan, run and fit the losses of families of models over their sizes."""
