# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The run's tokenizer, from a ``tokenizer.json`` as transformers reads it; the ids of documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tokenizers

from torchtitan_lr.config.files import read_json, read_regular
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError, require

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""The ids of one document, BOS and EOS included: ``(n,)``, of any integer type."""

HF_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
ASSETS = "torchtitan_lr/data/assets/"  # in the package
SHIPPED = ASSETS + "bpe32k"  # of the papers' sizes, in the package
_KEY = "model.hf_assets_path"
_PROBE = (
    "def f(x):\r\n\treturn x**2 + 0.125e-3  # caf\u00e9, cafe\u0301\n\n\n   We'll DON'T 1234567 "
    "\u00bd\u00a0\u2009\u200b\u4f60\u597d\u3002 \u0434\u043e\u043c \u05e9\u05dc\u05d5\u05dd "
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \ud55c\uae00 \ufb01 "
    "\uff21\u0130\u00df \U0001f469\u200d\U0001f4bb _a_b <s> [UNK] \x00\x07\ufffd\ufeff a.b/c?d=e  "
) + "x" * 60
"""A text in which many rules of a tokenizer show."""


def resolve_assets_path(path: str) -> Path:
    """Find an assets folder: the path itself, else relative to the package's parent folder."""
    here = user_path(path, _KEY)
    shipped = Path(__file__).resolve().parents[2] / path
    return shipped if not here.is_dir() and os.path.isdir(shipped) else here


def build_tokenizer(path: str) -> Tokenizer:
    """Build the tokenizer of an assets folder; a process reads it once.

    A ConfigError says that there is no such folder, or no readable tokenizer with some tokens.
    """
    file = resolve_assets_path(path) / HF_FILE
    want = f"a folder that holds {HF_FILE}, as `hf download OWNER/NAME --include"
    want += " '*token*' '*chat*' 'generation*' --local-dir FOLDER` makes one,"
    want += f" or {SHIPPED}, in the package"
    if (file.parent / "tokenizer.model").is_file():
        want += "; torchtitan-lr tokenizer --ranks converts llama-3's tokenizer.model"
    require(file.is_file(), _KEY, path, want)
    try:
        return _known(str(file.parent))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library raises bare Exception, or panics
        raise ConfigError(_KEY, str(file), f"a readable {file.name} ({error})") from error


class Tokenizer:
    """A folder's ``tokenizer.json``, with the special tokens of the files beside it.

    Which tokens are special, and which are BOS and EOS, is what transformers reads from
    ``tokenizer_config.json``, ``special_tokens_map.json`` and ``added_tokens.json``. Truncation and
    padding of the file are for batches of other models, and are off: a document keeps its length.
    The library raises a bare Exception for what it cannot read.
    """

    def __init__(self, folder: str) -> None:
        self.tokenizer_path, place = folder, Path(folder)
        content = read_regular(place / HF_FILE)
        self.file_digest = hashlib.sha256(content).hexdigest()
        self.tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.config = _read_if_there(place / TOKENIZER_CONFIG)
        named, self.more_special_tokens = _named_tokens(place, self.config)  # without names
        self.special_tokens = {name: _text(token) for name, token in named.items()}
        _add_tokens(self.tokenizer, place, self.config, named, self.more_special_tokens)
        if not self.get_vocab():
            raise ValueError("it has no tokens")
        self.bos_id, self.eos_id = (
            None if text is None else self.tokenizer.token_to_id(text)
            for text in map(self.special_tokens.get, ("bos_token", "eos_token"))
        )
        # What the library puts around a text; and what stands around a document: BOS and EOS too.
        self.added = first, last = self._added_around()
        bos = [] if self.bos_id is None or self.bos_id in first else [self.bos_id]
        eos = [] if self.eos_id is None or self.eos_id in last else [self.eos_id]
        self.begin, self.end = bos + first, last + eos
        self.stop_ids = {*stop_ids_of(place), self.eos_id} - {None}  # end a generated text

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before and after a text."""
        for text in ("a", *islice(self.get_vocab(), 100)):
            plain = self.tokenizer.encode(text, add_special_tokens=False).ids
            whole = self.tokenizer.encode(text).ids
            start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
            if plain and start is not None:
                return whole[:start], whole[start + len(plain) :]
        return [], []

    def encode(
        self, text: str, add_bos: bool = False, add_eos: bool = False, special: bool = False
    ) -> list[int]:
        """Encode a text.

        With ``special`` the name of a special token in it is that token, and not just text: for
        prompts, but not for documents, which could forge their end.
        """
        special = special and not self.config.get("split_special_tokens", False)
        ids = self.encode_text(text, special).ids
        return self.begin * add_bos + ids + self.end * add_eos

    def encode_text(self, text: str, special: bool = False) -> Any:
        """Return the library's ``Encoding``; a chat template means the tokens that it names."""
        self.tokenizer.encode_special_tokens = not special
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, every space of it."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by token, the added ones included."""
        return dict(self.tokenizer.get_vocab())


_known = lru_cache(maxsize=2)(Tokenizer)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str:
    """Return the text of a special token: a string, or a table of its settings."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"a special token that is no text: {token!r}")
    return text


def _named_tokens(place: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the special tokens with a name, such as ``eos_token``, and those without one."""
    given = dict(config)
    if "added_tokens_decoder" not in config:  # else transformers ignores the older file
        given |= _read_if_there(place / SPECIAL_TOKENS_MAP)
    more = given.get("extra_special_tokens") or given.get("additional_special_tokens") or []
    if isinstance(more, dict):
        given |= more
        more = list(more.values())
    named = {
        name: token
        for name, token in given.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    return named, more


def _add_tokens(
    backend: Any, place: Path, config: dict[str, Any], named: dict[str, Any], more: list[Any]
) -> None:
    """Add tokens, or replace their settings, as far as ``tokenizer.json`` has them otherwise."""

    def token_of(given: Any) -> Any:
        settings = given if isinstance(given, dict) else {"content": given, "special": True}
        settings = {name: value for name, value in settings.items() if name != "__type"}
        return tokenizers.AddedToken(**settings)

    names = {_text(token) for token in named.values()}
    listed = config.get("added_tokens_decoder")
    if listed is None:
        ids = _read_if_there(place / "added_tokens.json")
        listed = {number: {"content": text, "special": False} for text, number in ids.items()}
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    tokens = [token_of(listed[number]) for number in sorted(listed, key=int)]
    tokens = [token for token in tokens if repr(token) not in known]
    there = {token.content for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    tokens += [token_of(each) for each in (*named.values(), *more) if _text(each) not in there]
    for token in tokens:
        token.special |= token.content in names
    backend.add_tokens(tokens)


def stop_ids_of(folder: Path) -> list[int]:
    """Return the tokens that end a text: of ``generation_config.json``, else ``config.json``."""
    for file in (folder / GENERATION_CONFIG, folder / "config.json"):
        if file.is_file():
            given = read_json(file).get("eos_token_id")
            found = given if isinstance(given, list) else [] if given is None else [given]
            want = f"a number or a list of numbers, in {file}"
            require(all(type(each) is int for each in found), "eos_token_id", given, want)
            return found
    return []


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the smallest vocabulary that a model needs for a tokenizer: ids can have gaps."""
    ids = tokenizer.get_vocab()
    return max(len(ids), 1 + max(ids.values(), default=-1))


@lru_cache(maxsize=2)
def ids_without_token(tokenizer: Tokenizer, rows: int) -> tuple[int, ...]:
    """Return the ids of a vocabulary of ``rows`` that a tokenizer has no token for."""
    return tuple(sorted(set(range(rows)).difference(tokenizer.get_vocab().values())))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of ``encode(text)``, which keeps Python's lock: this does not."""
    rust = tokenizer.tokenizer
    if not rust.encode_special_tokens:  # another thread may be encoding
        rust.encode_special_tokens = True
    # The fast call omits the offsets of the tokens in the text.
    found = rust.encode_batch_fast(list(texts), add_special_tokens=False)
    return [each.ids for each in found]


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Return the ids of ``encode(text, add_bos=True, add_eos=True)``, without Python's lock."""
    begin, end = tokenizer.begin, tokenizer.end
    found = encode_texts(tokenizer, texts)
    return [np.array([*begin, *ids, *end], dtype=np.int32) for ids in found]


def tokenizer_identity(tokenizer: Tokenizer) -> str:
    """Return a digest of a tokenizer's file, of its tokens, and of what it makes of a fixed text.

    So it is the same after an update of the library that changes no id.
    """
    ends = [tokenizer.begin, tokenizer.end, tokenizer.bos_id, tokenizer.eos_id]
    rules = [*ends, tokenizer.config.get("split_special_tokens", False)]
    ids = list[list[int]]()
    with suppress(Exception):  # some vocabularies of words alone refuse a word that they lack
        ids = [tokenizer.encode_text(_PROBE, special).ids for special in (False, True)]
    parts = [tokenizer.file_digest, rules, ids, sorted(tokenizer.get_vocab().items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
