# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Selection of the held-out documents of a ``local`` corpus, used for validation.

A document is held out iff its hash is among the lowest 1/200 of all hashes. The choice depends on
the document alone: not on its position, the batch, the number of ranks or whether validation is
enabled, and all copies of a document are in the same split. In a corpus of a few MiB or less this
rule would hold out nothing or a few words. A small corpus therefore holds out the documents with
the lowest hashes, up to a tenth of the text or 16 KiB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

ONE_IN = 200
"""A large corpus holds out one document in this many."""

SMALL_BYTES = 8 << 20
"""A corpus of at most this many bytes is read on opening, to find its lowest hashes."""

ENOUGH_BYTES = 16 << 10
"""Bytes of text that a small corpus holds out, but at most a tenth of it."""

_HASHES = 1 << 64
USUAL_LIMIT = _HASHES // ONE_IN
"""Documents with a hash below this limit are held out, in a large corpus."""


def document_hash(document: str) -> int:
    """Return a 64-bit hash of a document's text."""
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def small_limit(documents: Iterable[tuple[int, int]]) -> int:
    """Choose the hash limit of a small corpus.

    Args:
        documents: Hash and bytes of every document.

    Returns:
        The hash below which a document is held out: at least :data:`USUAL_LIMIT`, and high enough
        for one document; 0 (nothing held out) for a corpus of a single document.
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
    return last  # the document with the highest hash is always left for training
