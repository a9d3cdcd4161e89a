# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the papers print, and formulas that only their tables use."""
