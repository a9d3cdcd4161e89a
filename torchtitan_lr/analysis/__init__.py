# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Closed forms: how many parameters a model has and what a step of training costs."""
