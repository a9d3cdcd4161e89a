# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The largest entries as a bitmap and values: exact for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message
from torchtitan_lr.compression.codecs.bitmap import mark, pack, unpack
from torchtitan_lr.compression.codecs.sparsify import largest, left_over
from torchtitan_lr.compression.sizes import (
    VALUE_BYTES,
    CodecSizes,
    kept_entries,
    packed_bytes,
)


class SparseCodec(Codec):
    """Exactly k entries for each destination: 1 + 32(1 − θ) bits per parameter.

    Args:
        theta: Share of unsent entries, in [0, 1).
    """

    name = "sparse"

    def __init__(self, theta: float) -> None:
        self.theta = theta

    @classmethod
    def build(cls, sizes: CodecSizes, ranks: int) -> SparseCodec:
        """Build the codec for a θ; see `Codec.build`."""
        return cls(sizes.theta)

    def message_bytes(self, m: int) -> dict[str, int]:
        """Return the bytes of bitmap and values; see `Codec.message_bytes`."""
        return {
            "index": packed_bytes(m),
            "values": VALUE_BYTES * kept_entries(m, self.theta),
        }

    def bits(self) -> dict[str, float]:
        """Return 1 bit of the bitmap and 32(1 − θ) of values."""
        return {"index": 1.0, "values": 32 * (1 - self.theta)}

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send bitmaps, and values in the order of their bits; see `Codec.encode`."""
        m = rows.shape[1]
        chosen, _ = largest(rows, self.theta)
        marked = mark(chosen, m)
        positions = _positions(marked, chosen.shape[1])
        values = rows.gather(1, positions)
        return Message({"index": pack(marked), "values": values}, {}, positions, values)

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Add the ranks' entries in the order of the ranks; see `Codec.decode`."""
        values = received["values"]
        k = values.shape[1]
        if k != kept_entries(m, self.theta):
            raise ValueError(f"{k} values a rank for {m} entries at theta {self.theta}")
        positions = _positions(unpack(received["index"], m), k)
        total = torch.zeros(m, dtype=values.dtype, device=values.device)
        for own, position in zip(values, positions, strict=True):
            total.index_add_(0, position, own)
        return Decoded(total)

    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return all but the largest entries (W, m)."""
        assert message.positions is not None and message.values is not None
        return left_over(rows, message.positions, message.values)


def _positions(marked: Tensor, k: int) -> Tensor:
    """Return the k set entries of every row of a mask (W, m), ascending: (W, k)."""
    w, m = marked.shape
    return marked.flatten().nonzero_static(size=w * k).view(w, k) % m
