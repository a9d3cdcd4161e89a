# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Buckets of tensors: what is sent, decomposed or launched together."""

from collections.abc import Sequence


def split_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split the indices of entries into buckets of at most ``limit`` elements, or one larger."""
    result: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not result or size > room:
            result.append([])
            room = limit
        result[-1].append(index)
        room -= size
    return result
