# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run will need and send, from its configuration alone: `formulas` applied to it."""
