# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No compression: the plain reduce-scatter by the codecs' path."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message


class DenseCodec(Codec):
    """Sends everything, owes nothing."""

    def encode(self, rows: Tensor, seed: int) -> Message:
        """Send the rows themselves; see `Codec.encode`."""
        return Message(summed={"rows": rows})

    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Return what the collective summed."""
        return Decoded(received["rows"])

    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return zeros (W, m)."""
        return torch.zeros_like(rows)
