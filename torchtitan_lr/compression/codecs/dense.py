# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No compression: a plain reduce-scatter through the codecs' interface."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message
from torchtitan_lr.compression.sizes import DENSE, VALUE_BYTES, CodecSizes


class DenseCodec(Codec):
    """Sends all entries: 32 bits per parameter."""

    name = DENSE.name
    lossy = False

    @classmethod
    def build(cls, sizes: CodecSizes, ranks: int) -> DenseCodec:
        """Build the codec, which has no parameters."""
        return cls()

    def message_bytes(self, m: int) -> dict[str, int]:
        """Return the bytes of the rows; see `Codec.message_bytes`."""
        return {"values": VALUE_BYTES * m}

    def bits(self) -> dict[str, float]:
        """Return 32 bits of values."""
        return {"values": 32.0}

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send the rows themselves; see `Codec.encode`."""
        return Message(summed={"rows": rows})

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Return the sums of the collective."""
        return Decoded(received["rows"])

    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return zeros (W, m)."""
        return torch.zeros_like(rows)
