# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher: start the ranks of a run, stop them and report."""
