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
from torchtitan_lr.compression.codecs.sketch import SketchCodec
from torchtitan_lr.compression.codecs.sparse import SparseCodec
from torchtitan_lr.compression.sizes import DENSE, CodecSizes

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


def build_codec(sizes: CodecSizes, ranks: int) -> Codec:
    """Build the codec for W ranks with the given parameters."""
    return CODECS[sizes.name].build(sizes, ranks)


def unit_codec(codec: CodecSizes, compressed: int, ranks: int, all_reduce: bool) -> CodecSizes:
    """Return the codec of a unit: dense if a unit of its size cannot be decoded.

    Args:
        codec: The configured codec.
        compressed: Compressed entries of a destination, or of the whole shard for `all_reduce`.
        ranks: Ranks W.
        all_reduce: Whether every rank needs the whole sum.
    """
    m = -(-compressed // ranks) if all_reduce else compressed
    return codec if m == 0 or build_codec(codec, ranks).decodes(m) else DENSE


def codec_bits(sizes: CodecSizes, replicas: int = 0) -> dict[str, float]:
    """Return the bits per parameter and rank by operation, for large tensors with fp32 values.

    If every replica needs the sum, the owners return their sums: as bitmap and values, a share of
    at most W(1 − θ), or whole if that is less: min(32, 1 + 32·W(1 − θ)).

    Args:
        sizes: The codec.
        replicas: HSDP's replicas W, whose shards are all-reduced; 0 for FSDP's reduce-scatter.
    """
    codec = build_codec(sizes, max(1, replicas))
    bits = codec.bits()
    if replicas and codec.lossy:
        bits["returned"] = min(32.0, 1 + 32 * replicas * (1 - sizes.theta))
    return bits


for _codec in (DenseCodec, SparseCodec, SketchCodec):
    register_codec(_codec)
