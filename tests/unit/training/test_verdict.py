# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math

import pytest
import torch

from torchtitan_lr.training.verdict import decide

NOWHERE = torch.tensor(math.inf)


@pytest.mark.parametrize(
    ("loss", "square", "stop", "norm"),
    [
        (1.5, 9.0, False, 3.0),
        (1.5, 9.0, True, 3.0),
        (math.nan, 9.0, False, 3.0),
        (math.inf, 9.0, True, 3.0),
        (1.5, math.inf, False, math.inf),
        (1.5, 1e38, False, 1e19),
        (1.5, 1e40, False, 1e20),  # fp32 cannot hold the square
    ],
)
def test_one_process_agrees_with_itself(
    loss: float, square: float, stop: bool, norm: float
) -> None:
    share, counts = torch.tensor(square, dtype=torch.float64), (float(2**53), 0.0, 1.0)
    verdict = decide(torch.tensor(loss), share, stop, counts, NOWHERE)
    found, finite = verdict.read(), math.isfinite(loss)
    assert found.rejected is (not finite or square > 3.4e38)
    assert (found.norm, found.stop, found.next_counts) == (norm, stop, counts)
    assert (found.bad_ranks, found.loss_is_finite) == (not finite, finite)
    assert verdict.rejected.item() == float(found.rejected)
    apart = decide(torch.tensor(loss), share, stop, counts, NOWHERE, replica=1, replicas=3)
    assert apart.read() == found and apart.norm.item() == norm
    assert verdict.rejected.dtype == torch.float32 and verdict.norm.item() == norm
