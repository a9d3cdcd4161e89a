# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The run's tokenizer: torchtitan's, from a ``tokenizer.json`` or a tiktoken rank file."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.bpe import HF_FILE, TIKTOKEN_FILE, read_ranks, save_hf
from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:  # checks use this before torch is loaded
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

SHIPPED = "torchtitan_lr/data/assets/bpe32k"
"""The tokenizer of the papers' sizes, in the package."""

HUB = "hf://"
"""Begins the name of a tokenizer on the Hugging Face hub."""

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
        return _from_hub(path)
    here = user_path(path, _KEY)
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if not here.is_dir() and os.path.isdir(shipped) else here


@lru_cache(maxsize=4)  # the checks and the trainer share it
def _from_hub(path: str) -> Path:
    from huggingface_hub import snapshot_download

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
        raise ConfigError(_KEY, path, want) from error


def tokenizer_file(folder: Path) -> Path | None:
    """Return a folder's tokenizer file, None if it has none."""
    files = (folder / name for name in (HF_FILE, TIKTOKEN_FILE))
    return next((file for file in files if file.is_file()), None)


def build_tokenizer(job_config: Any) -> HuggingFaceTokenizer:
    """Build the tokenizer of the assets folder (a ``TrainSpec`` hook).

    The result is cached per process until a file of the folder changes; the checks and the trainer
    share it. Of a rank file, names of special tokens in a text are text.

    Raises:
        ConfigError: The folder does not exist, or it has no readable tokenizer.
    """
    path = job_config.model.hf_assets_path
    file = tokenizer_file(resolve_assets_path(path))
    if file is None:
        want = f"a folder that holds {HF_FILE} or {TIKTOKEN_FILE}, hf://OWNER/NAME or {SHIPPED}"
        raise ConfigError(_KEY, path, want)
    try:
        stats = ((each.name, each.stat()) for each in sorted(file.parent.iterdir()))
        return _read(file, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    except ConfigError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(_KEY, str(file), f"a readable {file.name} ({error})") from error


@lru_cache(maxsize=2)
def _read(file: Path, versions: tuple[Any, ...]) -> HuggingFaceTokenizer:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

    if file.name == HF_FILE:
        return HuggingFaceTokenizer(str(file.parent))
    # torchtitan's class reads folders alone.
    with TemporaryDirectory() as folder:
        save_hf(read_ranks(file), Path(folder))
        tokenizer = HuggingFaceTokenizer(folder)
    tokenizer.tokenizer_path = str(file.parent)
    tokenizer.tokenizer.encode_special_tokens = True
    return tokenizer


def check_tokenizer(job_config: Any) -> int:
    """Return the smallest vocabulary that a model needs for the tokenizer.

    Raises:
        ConfigError: As for :func:`build_tokenizer`, or it has no tokens.
    """
    tokenizer = build_tokenizer(job_config)
    # Ids can have gaps, so the number of tokens may be too small.
    ids = tokenizer.get_vocab().values()
    size = max(tokenizer.get_vocab_size(), 1 + max(ids, default=-1))
    if size < 1:
        raise ConfigError(_KEY, job_config.model.hf_assets_path, "a tokenizer with some tokens")
    return size
