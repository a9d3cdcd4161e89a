# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Selection of the largest entries, and the residual of the others."""

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.bitmap import unpack
from torchtitan_lr.compression.sizes import kept_entries, verdict_block


def largest(rows: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return positions and values of the largest entries by magnitude, in no order.

    Each row has exactly ``kept_entries(m, theta)`` entries, so that it reaches θ; the published
    threshold, estimated from a sample, does not. A NaN counts as the largest and is sent.

    Args:
        rows: (W, m).
        theta: Share of unsent entries.

    Returns:
        Positions (W, k), int64, and values (W, k).
    """
    m = rows.shape[1]
    k = kept_entries(m, theta)
    if k == m:
        return torch.arange(m, device=rows.device).expand(rows.shape), rows.clone()
    positions = rows.abs().topk(k, dim=1, sorted=False).indices
    return positions, rows.gather(1, positions)


def left_over(
    rows: Tensor, positions: Tensor, values: Tensor, verdicts: Tensor | None = None
) -> Tensor:
    """Return rows without their sent entries; entries of failed blocks count as unsent.

    Args:
        rows: (W, m); overwritten.
        positions: Sent entries (W, k).
        values: Their values (W, k).
        verdicts: The owners' packed verdicts (W, v), see `Decoded`.
    """
    m = rows.shape[1]
    if verdicts is None:
        back = torch.zeros_like(values)
    else:
        failed = unpack(verdicts, verdicts.shape[1] * 8).gather(1, positions // verdict_block(m))
        back = torch.where(failed, values, 0)
    return rows.scatter_(1, positions, back)
