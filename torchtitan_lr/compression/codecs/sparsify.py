# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Choosing the largest entries, and keeping account of the others."""

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.bitmap import unpack
from torchtitan_lr.compression.sizes import kept_entries, verdict_block


def largest(rows: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Return positions and values of the largest entries by magnitude, in no order.

    Exactly ``kept_entries(m, theta)`` a row, so that each row reaches θ; a threshold estimated from
    a sample, as published, undershoots it. A NaN counts as the largest: it is sent, and noticed.

    Args:
        rows: (W, m).
        theta: Share of entries to leave out.

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
    """Return rows without their sent entries; what lies in a failed block counts as not sent.

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
