# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What tests use: pools of ranks, parity cases, faults."""
