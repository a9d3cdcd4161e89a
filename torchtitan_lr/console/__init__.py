# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The console: a rank's lines, and the progress of long work."""
