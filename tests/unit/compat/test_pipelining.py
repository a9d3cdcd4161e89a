# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Actions of a pipeline's schedule."""

import torch
from torch.distributed.pipelining import schedules

from tests.unit.compat.doors import changed
from torchtitan_lr.compat import pipelining


def test_pipelining_the_actions_of_a_forward_pass():
    """Torch 2.15 added the waits for sends, without which a schedule is refused."""
    kinds = set(schedules._ComputationType.__members__)
    backward = {kind for kind in kinds if kind.endswith("_B") or "BACKWARD" in kind}
    expected = kinds - backward - {"REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
    want = changed("_ComputationType", "pipelining.forward_only")
    assert {*pipelining._FORWARD} & kinds == expected, want
    assert {*pipelining._FORWARD} - kinds <= {"WAIT_SEND_F"}, want
    assert "WAIT_SEND_F" in kinds or torch.__version__ < "2.15", want
