# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The run's tokenizer: torchtitan's, from a ``tokenizer.json``; and the ids of documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.pairs import Tokens
from torchtitan_lr.errors import ConfigError, require

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

Tokenizer: TypeAlias = "HuggingFaceTokenizer"

HF_FILE = "tokenizer.json"
RANKS_DIGEST = "ranks_sha256"  # key of tokenizer_config.json: of the rank file it was made from
SHIPPED = "torchtitan_lr/data/assets/bpe32k"  # of the papers' sizes, in the package
HUB = "hf://"  # begins the name of a tokenizer on the Hugging Face hub

_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "chat_template*"]
_KEY = "model.hf_assets_path"


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
        return _in_cache.get(path) or _from_hub(path)
    here = user_path(path, _KEY)
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if not here.is_dir() and os.path.isdir(shipped) else here


@lru_cache(maxsize=4)
def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download  # late: few runs need it

    repository = path.removeprefix(HUB)
    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES, etag_timeout=5))
    # Not found, gated, no network: each version and each layer below has exceptions of its own.
    except Exception as error:
        folder = "assets/hf/" + repository.rpartition("/")[2]
        want = (
            f"a tokenizer of the hub that can be read here ({type(error).__name__}); on a machine"
            f" with a network `hf download {repository} {HF_FILE} tokenizer_config.json"
            f" --local-dir {folder}` writes a folder to name instead; or {SHIPPED}, in the package"
        )
        raise ConfigError(_KEY, path, want) from error


_in_cache: dict[str, Path] = {}  # what `require_cached` found


def require_cached(path: str) -> None:
    """Find a tokenizer of the hub in the cache of Hugging Face; nothing is downloaded from then on.

    Raises:
        ConfigError: The cache has no such tokenizer.
    """
    from huggingface_hub import snapshot_download

    repository = path.removeprefix(HUB)
    try:
        found = snapshot_download(repository, allow_patterns=_HUB_FILES, local_files_only=True)
    except Exception as error:  # not cached, or no name of a repository
        want = (
            f"a tokenizer in the cache: reading a run downloads nothing; `hf download {repository}`"
        )
        raise ConfigError(_KEY, path, want) from error
    _in_cache[path] = Path(found)


def build_tokenizer(job_config: Any) -> Tokenizer:
    """Build the tokenizer of the assets folder.

    The result is cached per process until a file of the folder changes.

    Raises:
        ConfigError: The folder does not exist, or it has no readable tokenizer with some tokens.
    """
    path = job_config.model.hf_assets_path
    file = resolve_assets_path(path) / HF_FILE
    want = f"a folder that holds {HF_FILE}, hf://OWNER/NAME or {SHIPPED}"
    if (file.parent / "tokenizer.model").is_file():
        want += "; torchtitan-lr tokenizer --ranks converts llama-3's tokenizer.model"
    require(file.is_file(), _KEY, path, want)
    try:
        stats = ((each.name, each.stat()) for each in sorted(file.parent.iterdir()))
        versions = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        return _read(str(file.parent), versions)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(_KEY, str(file), f"a readable {file.name} ({error})") from error


@lru_cache(maxsize=2)
def _read(folder: str, versions: tuple[Any, ...]) -> Tokenizer:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer  # late: it imports torchtitan

    tokenizer = HuggingFaceTokenizer(folder)
    if not vocabulary(tokenizer):
        raise ValueError("it has no tokens")
    # The name of a special token in a text is then text: no document can forge the end of one.
    split = (tokenizer.config or {}).get("split_special_tokens", False)
    tokenizer.tokenizer.encode_special_tokens = bool(split)
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the smallest vocabulary that a model needs for a tokenizer: ids can have gaps."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=-1))


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Tokenise documents, on all cores and without Python's lock.

    The ids are those of ``encode(text, add_bos=True, add_eos=True)``, which keeps the lock.
    """
    rust = tokenizer.tokenizer
    # A tokenizer that pads would pad to the longest document of the batch.
    batches = [[text] for text in texts] if rust.padding else [list(texts)]
    # The fast call omits the offsets of the tokens in the text.
    found = (each.ids for batch in batches for each in rust.encode_batch_fast(batch))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    begin = [] if tokenizer.hf_adds_bos or bos is None else [bos]
    end = [] if tokenizer.hf_adds_eos or eos is None else [eos]
    return [np.array([*begin, *ids, *end], dtype=np.int32) for ids in found]


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return a digest of all that determines a tokenizer's ids, its library's version included."""
    ends = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.hf_adds_bos, tokenizer.hf_adds_eos]
    if tokenizer.tokenizer.encode_special_tokens:  # is no part of its JSON
        ends.append(True)
    parts = [version("tokenizers"), repr(ends), tokenizer.tokenizer.to_str()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
