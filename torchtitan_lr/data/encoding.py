# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Documents to tokens, many at a time and without Python's lock where the tokenizer allows it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    # Otherwise imported late: a corpus is opened without torch.
    from torchtitan_lr.data.tokenizer import TiktokenTokenizer
    from torchtitan_lr.titan.base import BaseTokenizer, HuggingFaceTokenizer

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""The ids of one document, begin and end tokens included: ``(n,)``, of any integer type."""

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


def encode_documents(tokenizer: BaseTokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Tokenise documents; the ids are those of ``encode(text, add_bos=True, add_eos=True)``.

    A Hugging Face tokenizer encodes the documents on all cores and releases Python's lock (a call
    of its ``encode`` keeps it). A tiktoken tokenizer does so in threads.
    """
    if _is_plain(tokenizer):
        return _encode_in_rust(tokenizer, texts)

    def encode(text: str) -> Tokens:
        return np.array(tokenizer.encode(text, add_bos=True, add_eos=True), dtype=np.int32)

    if _is_tiktoken(tokenizer) and len(texts) > 1:
        with ThreadPoolExecutor(min(len(texts), os.cpu_count() or 1)) as threads:
            return list(threads.map(encode, texts))
    return [encode(text) for text in texts]


def tokenizer_identity(tokenizer: BaseTokenizer) -> str | None:
    """Return a digest of all that determines a tokenizer's ids.

    Returns:
        A digest of its contents and of its library's version; None for an unknown kind of
        tokenizer, whose tokens are not cached.
    """
    if _is_plain(tokenizer):
        ends = [getattr(tokenizer, f"{kind}_id") for kind in ("bos", "eos")]
        added = [getattr(tokenizer, f"hf_adds_{kind}") for kind in ("bos", "eos")]
        parts = [version("tokenizers"), repr(ends + added), tokenizer.tokenizer.to_str()]
    elif _is_tiktoken(tokenizer):
        parts = [version("tiktoken"), tokenizer.digest]
    else:
        return None
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_plain(tokenizer: BaseTokenizer) -> TypeGuard[HuggingFaceTokenizer]:
    """Return whether a tokenizer is torchtitan's, with its own ``encode``."""
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

    return type(tokenizer) is HuggingFaceTokenizer


def _is_tiktoken(tokenizer: BaseTokenizer) -> TypeGuard[TiktokenTokenizer]:
    from torchtitan_lr.data.tokenizer import TiktokenTokenizer

    return type(tokenizer) is TiktokenTokenizer


def _encode_in_rust(tokenizer: HuggingFaceTokenizer, texts: Sequence[str]) -> list[Tokens]:
    rust = tokenizer.tokenizer
    # The fast call omits the offsets of the tokens in the text; older versions do not have it.
    encode = getattr(rust, "encode_batch_fast", rust.encode_batch)
    # A tokenizer that pads would pad to the longest document of the batch.
    batches = [[text] for text in texts] if rust.padding else [list(texts)]
    found = (encoding.ids for batch in batches for encoding in encode(batch))
    begin = _added(tokenizer.bos_id, tokenizer.hf_adds_bos)
    end = _added(tokenizer.eos_id, tokenizer.hf_adds_eos)
    return [np.array([*begin, *ids, *end], dtype=np.int32) for ids in found]


def _added(token: int | None, present: bool) -> list[int]:
    return [] if present or token is None else [token]
