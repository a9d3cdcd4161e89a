# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the room states again instead of importing it."""

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools.logging import logger

from torchtitan_lr import titan


def test_the_light_names_are_torchtitans():
    assert titan.IGNORE_INDEX == IGNORE_INDEX
    assert titan.logger is logger
