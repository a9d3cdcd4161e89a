# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which documents of one's own files are held out from training, to validate on.

A document is held out iff its hash is among the lowest 1/200 of all hashes. So the choice depends
on the document alone: not on its place, the batch, the number of ranks or whether anything
validates, and copies of a document are on one side. A corpus of a few MiB or less would hold out
nothing, or a few words: there the lowest hashes are, until a tenth of the text or 16 KiB is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

ONE_IN = 200
"""Documents for each held-out one, in a large corpus."""

SMALL_BYTES = 8 << 20
"""Files of no more bytes are read when a corpus is opened, to find its lowest hashes."""

ENOUGH_BYTES = 16 << 10
"""Text that a small corpus holds out, if that is no more than a tenth of it."""

_HASHES = 1 << 64
USUAL_LIMIT = _HASHES // ONE_IN
"""The hash below which a document is held out."""


def document_hash(document: str) -> int:
    """Return 64 bits that depend on a document's text alone."""
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def small_limit(documents: Iterable[tuple[int, int]]) -> int:
    """Choose the limit of a corpus that can be read as a whole.

    Args:
        documents: Hash and bytes of every document.

    Returns:
        The hash below which a document is held out: at least :data:`USUAL_LIMIT`, and one document
        at least; 0, so none, where the corpus is a single document.
    """
    sizes: dict[int, int] = {}
    for key, size in documents:
        sizes[key] = sizes.get(key, 0) + size
    if len(sizes) < 2:
        return 0
    wanted = min(ENOUGH_BYTES, sum(sizes.values()) // 10)
    *candidates, last = sorted(sizes)
    held = 0
    for key in candidates:
        if held and held >= wanted and key >= USUAL_LIMIT:
            return key
        held += sizes[key]
    return last  # never the last one: something is left to train on
