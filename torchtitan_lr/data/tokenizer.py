# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tokenizers: a Hugging Face ``tokenizer.json``, else a tiktoken rank file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.llama3 import (
    BOS,
    EOS,
    HF_FILE,
    LLAMA3_SPLIT,
    TIKTOKEN_FILE,
    llama3_specials,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan.base import BaseTokenizer, HuggingFaceTokenizer

SHIPPED = "torchtitan_lr/data/assets/bpe32k"
"""The tokenizer of the papers' sizes, in the package."""

HUB = "hf://"
"""Begins the name of a tokenizer on the Hugging Face hub."""

_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "chat_template*"]

# tiktoken's regex engine recurses: it panics on very long strings and on long runs of characters
# of one class.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000


class TiktokenTokenizer(BaseTokenizer):
    """A byte-level BPE from a rank file, with llama-3's split and special tokens.

    Args:
        path: A ``tokenizer.model``: a base64 token and its rank on each line.

    Attributes:
        digest: Digest of the file, of the split and of the special tokens.

    Raises:
        ConfigError: The file is not a rank file (SentencePiece models have the same name).
    """

    def __init__(self, path: str | Path) -> None:
        import tiktoken  # imported late: few runs read a rank file

        super().__init__()
        ranks = _read_ranks(Path(path))
        specials = llama3_specials(len(ranks))
        self._encoding = tiktoken.Encoding(
            name=Path(path).name,
            pat_str=LLAMA3_SPLIT,
            mergeable_ranks=ranks,
            special_tokens=specials,
        )
        self.bos_id: int = specials[BOS]
        self.eos_id: int = specials[EOS]
        parts = (sorted(ranks.items()), LLAMA3_SPLIT, specials)
        self.digest = hashlib.sha256(repr(parts).encode()).hexdigest()

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Tokenise a document.

        Names of special tokens in the text are encoded as ordinary text.

        Args:
            text: Text of any length.
            add_bos: Whether to begin with ``<|begin_of_text|>``.
            add_eos: Whether to end with ``<|end_of_text|>``.
        """
        tokens = [self.bos_id] if add_bos else []
        for piece in _pieces(text):
            tokens += self._encoding.encode(piece, disallowed_special=())
        if add_eos:
            tokens.append(self.eos_id)
        return tokens

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text.

        Returns:
            The text; bytes that are not UTF-8 become U+FFFD.
        """
        ids = list(token_ids)
        if skip_special_tokens:
            ids = [i for i in ids if i < self.bos_id]
        return self._encoding.decode(ids)

    def get_vocab_size(self) -> int:
        """Return the number of ids, special tokens included."""
        return self._encoding.n_vocab

    def get_ranks(self) -> dict[bytes, int]:
        """Return the rank, which is the id, of every ordinary token."""
        return {self._encoding.decode_single_token_bytes(i): i for i in range(self.bos_id)}


def resolve_assets_path(path: str) -> Path:
    """Find an assets folder: the path itself, else relative to the package's parent folder.

    Returns:
        The first of the two that is a folder, else ``path`` itself; for ``hf://OWNER/NAME`` the
        copy in the cache of Hugging Face, which is downloaded first where there is none.

    Raises:
        ConfigError: An invalid path, such as the home of an unknown user, or a tokenizer of the
            hub that cannot be downloaded.
    """
    if path.startswith(HUB):
        return _from_hub(path)
    here = user_path(path, "model.hf_assets_path")
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if not here.is_dir() and os.path.isdir(shipped) else here


def build_tokenizer(job_config: Any) -> BaseTokenizer:
    """Build the tokenizer of the assets folder (a ``TrainSpec`` hook).

    The result is cached per process until a file of the folder changes; the checks and the trainer
    share it.

    Returns:
        torchtitan's ``HuggingFaceTokenizer`` for a ``tokenizer.json``, else
        :class:`TiktokenTokenizer` for a ``tokenizer.model``.

    Raises:
        ConfigError: The folder does not exist, or it has no readable tokenizer.
    """
    key, path = "model.hf_assets_path", job_config.model.hf_assets_path
    file = tokenizer_file(resolve_assets_path(path))
    if file is None:
        want = f"a folder that holds {HF_FILE} or {TIKTOKEN_FILE}, hf://OWNER/NAME or {SHIPPED}"
        raise ConfigError(key, path, want)
    try:
        return _read(file, _versions(file.parent))
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(key, str(file), f"a readable {file.name} ({error})") from error


def tokenizer_file(folder: Path) -> Path | None:
    """Return a folder's tokenizer file, None if it has none."""
    files = (folder / name for name in (HF_FILE, TIKTOKEN_FILE))
    return next((file for file in files if file.is_file()), None)


def _versions(folder: Path) -> tuple[Any, ...]:
    """Return the name, size and modification time of every file in the folder."""
    stats = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@lru_cache(maxsize=4)  # the checks and the trainer share it
def _from_hub(path: str) -> Path:
    repository = path.removeprefix(HUB)
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, etag_timeout=5))
    # Not found, gated, no network: each version and each layer below has exceptions of its own.
    except Exception as error:
        folder = "assets/hf/" + repository.rpartition("/")[2]
        want = (
            f"a tokenizer of the hub that can be read here ({type(error).__name__}); on a machine"
            f" with a network `hf download {repository} tokenizer.json tokenizer_config.json"
            f" --local-dir {folder}` writes a folder to name instead; or {SHIPPED}, in the package"
        )
        raise ConfigError("model.hf_assets_path", path, want) from error


@lru_cache(maxsize=2)
def _read(file: Path, versions: tuple[Any, ...]) -> BaseTokenizer:
    if file.name == HF_FILE:
        return HuggingFaceTokenizer(str(file.parent))
    return TiktokenTokenizer(file)


def check_tokenizer(job_config: Any) -> int:
    """Check that the tokenizer exists and is readable.

    Returns:
        The smallest vocabulary that a model needs for it: the largest id plus one.

    Raises:
        ConfigError: As for :func:`build_tokenizer`, or it has no tokens.
    """
    tokenizer = build_tokenizer(job_config)
    size = tokenizer.get_vocab_size()
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # Ids can have gaps, so the number of tokens may be too small.
        size = max(size, 1 + max(tokenizer.get_vocab().values(), default=-1))
    if size < 1:
        path = job_config.model.hf_assets_path
        raise ConfigError("model.hf_assets_path", path, "a tokenizer with some tokens")
    return size


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError, binascii.Error):
        ranks = {}
    covers_bytes = all(bytes([i]) in ranks for i in range(256))
    if sorted(ranks.values()) != list(range(len(ranks))) or not covers_bytes:
        raise ConfigError(
            "model.hf_assets_path",
            str(path),
            f"a tiktoken rank file (base64 token and rank per line), or a {HF_FILE} next to it",
        )
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """Cut text below the limits of tiktoken's regex engine; ordinary documents are not cut."""
    for start in range(0, len(text), _MAX_CHARS):
        piece = text[start : start + _MAX_CHARS]
        if len(piece) > _MAX_RUN and _longest_run(piece) > _MAX_RUN:
            yield from _cut_runs(piece)
        else:
            yield piece


def _longest_run(text: str) -> int:
    words = max(map(len, text.split()), default=0)
    return max(words, max(map(len, re.split(r"\S+", text))))


def _cut_runs(text: str) -> Iterator[str]:
    start = 0
    for run in re.finditer(r"\s+|\S+", text):
        for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]
