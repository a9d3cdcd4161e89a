# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A gradient codec from outside the package: ``sign``, a bit per entry and a size per destination.

Each rank sends the signs of its rows and the mean size of every row. A run names this module by
``experimental.custom_import``.
"""

import torch

from torchtitan_lr.compression.codecs import Codec, Decoded, Message, pack, unpack
from torchtitan_lr.compression.settings import CODECS
from torchtitan_lr.config.schema import CODEC_NAMES


class SignCodec(Codec):
    sends_all = True

    def encode(self, rows, seed):
        size = rows.abs().mean(1, keepdim=True)  # (W, 1)
        sent = torch.where(rows < 0, -size, size)  # (W, m)
        positions = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape)
        swapped = {"index": pack(rows < 0), "values": size}
        return Message(positions, rows.clone(), swapped, lost=rows - sent)

    def decode(self, received, m, seed):
        negative, size = unpack(received["index"], m), received["values"]  # (W, m), (W, 1)
        return Decoded(torch.where(negative, -size, size).sum(0))


CODECS["sign"] = SignCodec
CODEC_NAMES.append("sign")
