# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient codecs: reductions of W rows of a gradient, one for each owning rank."""

from torchtitan_lr.compression.codecs.base import Codec, Decoded, Message
from torchtitan_lr.compression.codecs.sketch import SketchCodec
from torchtitan_lr.compression.codecs.sparse import SparseCodec
from torchtitan_lr.compression.sizes import CodecSizes

__all__ = ["Codec", "Decoded", "Message", "SketchCodec", "SparseCodec", "build_codec"]


def build_codec(sizes: CodecSizes, ranks: int) -> Codec:
    """Build the codec for W ranks with the given parameters."""
    if sizes.name == "sketch":
        return SketchCodec(ranks, sizes.c, sizes.theta)
    return SparseCodec(sizes.theta)
