# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient codecs: reductions of W rows of a gradient, one for each owning rank."""

from torchtitan_lr.compression.codecs.base import Decoded, Message
from torchtitan_lr.compression.codecs.sketch import SketchCodec
from torchtitan_lr.compression.codecs.sparse import SparseCodec

Codec = SketchCodec | SparseCodec

__all__ = ["Codec", "Decoded", "Message", "SketchCodec", "SparseCodec"]
