# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One file per model family: what a linear becomes, and all that follows from it."""
