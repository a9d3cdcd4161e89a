# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the room states again instead of importing it."""

from torchtitan_lr import titan
from torchtitan_lr.titan import IGNORE_INDEX, logger


def test_the_light_names_are_torchtitans():
    assert titan.IGNORE_INDEX == IGNORE_INDEX
    assert titan.logger is logger
