# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the products of a step fetch: the next weight and the cache of the next attention."""

from collections.abc import Sequence
from enum import IntEnum, auto

from torchtitan_lr.inference.native.packing import VECTOR_BYTES, Op


class Kind(IntEnum):
    """Operations of ``step.cpp``, in its order."""

    EMBED = 0
    NORM = auto()
    LINEAR = auto()
    MIX = auto()
    ATTEND = auto()
    ATTEND_LATENT = auto()
    QUANTIZE = auto()
    SCREEN = auto()
    PICK = auto()
    ARGMAX = auto()


def look_ahead(ops: Sequence[Op], batch: int, fetches: int, itemsize: int) -> None:
    """Write into each product how far the next product and the next attention are.

    The weight of the one and the cache of the other are fetched meanwhile. After the last ones
    follow the first ones, of the next step.

    Args:
        ops: A step's operations.
        batch: Number of rows.
        fetches: Number of blocks; 0: caches are not fetched.
        itemsize: Bytes of a number.
    """
    attentions = (Kind.ATTEND, Kind.ATTEND_LATENT)
    product = next(i for i, op in enumerate(ops) if op.kind == Kind.LINEAR)
    attention = next(i for i, op in enumerate(ops) if op.kind in attentions)
    rate = _rate(ops, ops[attention], batch, fetches, itemsize) if fetches else 0
    for i, op in reversed(list(enumerate(ops))):
        if op.kind == Kind.LINEAR:
            op.n[6], op.n[7], op.n[8] = product - i, (attention - i) * bool(fetches), rate
            product = i
        elif op.kind in attentions:
            attention = i


def _rate(ops: Sequence[Op], attention: Op, batch: int, blocks: int, itemsize: int) -> int:
    """Return how many vectors of a cache a tile of eight rows fetches per 2^16 input channels.

    Spread evenly over a block's products, since memory brings both the weights and the cache.
    """
    vector = VECTOR_BYTES // itemsize
    _, groups, width, capacity, rank, *_ = attention.n
    values = groups if attention.kind == Kind.ATTEND else 1
    vectors = batch * capacity * (groups * width + values * rank) // vector
    products = [op for op in ops if op.kind == Kind.LINEAR]
    panels = sum(-(-op.n[3] // (2 * vector)) * op.n[1] for op in products)
    channels = batch // 8 * panels // blocks
    return min((vectors << 16) // max(channels, 1), 1 << 16)
