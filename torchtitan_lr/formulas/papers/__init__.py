# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers printed in the papers, and formulas used only by their tables."""
