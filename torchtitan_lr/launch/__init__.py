# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What starts the ranks of a run, and ends with them."""
