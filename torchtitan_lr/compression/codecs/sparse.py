# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The largest entries as a bitmap and values: exact for any number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.base import Decoded, Message
from torchtitan_lr.compression.codecs.entries import largest, pack, unpack
from torchtitan_lr.compression.sizes import kept_entries


@dataclass(frozen=True)
class SparseCodec:
    """Exactly k entries for each destination: 1 + 32(1 − θ) bits per parameter.

    Args:
        theta: Share of unsent entries, in [0, 1).
    """

    theta: float

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send bitmaps, and values in the order of their bits; see `SketchCodec.encode`."""
        chosen, _ = largest(rows, self.theta)
        marked = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, chosen, True)
        positions = _positions(marked, chosen.shape[1])
        values = rows.gather(1, positions)
        return Message(positions, values, {"index": pack(marked), "values": values})

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Add the ranks' entries in the order of the ranks; see `SketchCodec.decode`."""
        values = received["values"]
        k = values.shape[1]
        if k != kept_entries(m, self.theta):
            raise ValueError(f"{k} values a rank for {m} entries at theta {self.theta}")
        places = _positions(unpack(received["index"], m), k).flatten()
        total = values.new_zeros(m)
        # Both add in a fixed order: accelerators sort `index_put_`'s places, where `index_add_`
        # would add atomically. On CPUs it is the other way round.
        if total.device.type == "cpu":
            return Decoded(total.index_add_(0, places, values.flatten()))
        return Decoded(total.index_put_((places,), values.flatten(), accumulate=True))


def _positions(marked: Tensor, k: int) -> Tensor:
    """Return the k set entries of every row of a mask (W, m), ascending: (W, k)."""
    w, m = marked.shape
    return marked.flatten().nonzero_static(size=w * k).view(w, k) % m
