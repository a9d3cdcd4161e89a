# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Messages keep the name of their boundary."""

from types import SimpleNamespace

import torch

from torchtitan_lr.parallel.pipeline.boundaries import boundary_of, mark


def test_a_marked_message_is_found_among_arguments():
    operation = SimpleNamespace(tensor=torch.zeros(2))
    assert mark([operation], 3, "backward") == [operation]
    assert boundary_of(([operation.tensor], "group", 1)) == ("boundary 3", "backward")


def test_nothing_else_is():
    assert boundary_of(([torch.zeros(2)], "group", 1)) is None
    assert boundary_of(()) is None
