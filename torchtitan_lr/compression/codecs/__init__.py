# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient codecs: reductions of W rows of a gradient, one for each owning rank."""

from torchtitan_lr.compression.codecs.base import (
    CODECS,
    Codec,
    Decoded,
    Message,
    Steps,
    Works,
    complete,
    exchange,
    gather,
    register_codec,
)
from torchtitan_lr.compression.codecs.dense import DenseCodec
from torchtitan_lr.compression.codecs.registry import build_codec, codec_bits, unit_codec
from torchtitan_lr.compression.codecs.sketch import SketchCodec
from torchtitan_lr.compression.codecs.sparse import SparseCodec

__all__ = [
    "CODECS",
    "Codec",
    "Decoded",
    "DenseCodec",
    "Message",
    "SketchCodec",
    "SparseCodec",
    "Steps",
    "Works",
    "build_codec",
    "codec_bits",
    "complete",
    "exchange",
    "gather",
    "register_codec",
    "unit_codec",
]
