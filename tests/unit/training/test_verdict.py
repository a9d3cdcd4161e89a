# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math

import pytest
import torch

from torchtitan_lr.training.verdict import Findings, Verdict


@pytest.mark.parametrize(
    ("loss", "square", "stop", "findings"),
    [
        (1.5, 9.0, False, Findings(False, 3.0, 0, False, True)),
        (1.5, 9.0, True, Findings(False, 3.0, 0, True, True)),
        (math.nan, 9.0, False, Findings(True, 3.0, 1, False, False)),
        (math.inf, 9.0, True, Findings(True, 3.0, 1, True, False)),
        (1.5, math.inf, False, Findings(True, math.inf, 0, False, True)),
        (1.5, 1e38, False, Findings(False, 1e19, 0, False, True)),
        (1.5, 1e40, False, Findings(True, 1e20, 0, False, True)),  # fp32 cannot hold the square
    ],
)
def test_one_process_agrees_with_itself(
    loss: float, square: float, stop: bool, findings: Findings
) -> None:
    share = torch.tensor(square, dtype=torch.float64)
    verdict = Verdict.all_reduced(torch.tensor(loss), share, stop)
    assert verdict.read() == findings
    bad = not math.isfinite(loss) or square > 3.4e38
    assert findings.rejected is bad
    assert verdict.rejected.item() == float(bad) and verdict.rejected.dtype == torch.float32
    assert verdict.norm.item() == findings.norm


def test_counts_are_summed_exactly_with_the_verdict() -> None:
    counts = (float(2**53), 0.0, 1.0)
    verdict = Verdict.all_reduced(torch.tensor(1.5), torch.tensor(9.0), False, counts)
    assert verdict.read() == Findings(False, 3.0, 0, False, True, counts)
