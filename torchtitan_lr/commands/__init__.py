# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of the commands in scripts/, and what they share with the tests."""
