# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What is private to torch and torchtitan, in one place."""
