# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Faults of replicas that come and go, at chosen points of a step, and what they cost."""
