# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Second statements of what runs, and the papers' tables, for comparison."""
