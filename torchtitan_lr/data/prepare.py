# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The prepared tokens of a run: which sources it reads, and the folders that hold their tokens.

A folder's name in ``training.token_folder`` is a hash of all that determines its content: the files
with what is in them, the tokenizer, the rule of the held-out part. So a folder is never changed,
and who reads it needs no lock. The number of ranks does not count: one process evaluates what 64
train on.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_lr.console.log import say
from torchtitan_lr.data.corpus import RECORD, Corpus, Rows
from torchtitan_lr.data.sources import LIBRARIES, ONE_IN, Reader, Source, data_path
from torchtitan_lr.data.tokenize import prepare_folder, signature_of
from torchtitan_lr.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lr.errors import one_of, require

TRAINING = (*LIBRARIES, "local", "prepared", "c4", "hf")
VALIDATION = ("training", *LIBRARIES, "local")

PATHS = {  # what must be named
    "local": "a file, folder or pattern of .txt, .jsonl or .parquet",
    "hf": "a dataset of the Hub such as 'owner/name', or a folder of one",
    "prepared": "a folder that `torchtitan-lr prepare` or Megatron-LM wrote",
}
C4_NAME = "allenai/c4"
C4 = {"hf_name": "en", "hf_split": "train", "hf_held_out": "validation"}

KEYS = ("dataset", "weight", "path", "name", "text_column", "hf_name", "hf_split")
"""Keys of an entry of `training.mixture`; the last three replace `training`'s keys."""

SET_KEYS = ("dataset", "dataset_path", "steps", "name")
"""Keys of an entry of `validation.sets`."""

PREPARED = "TORCHTITAN_LR_PREPARED"  # variable of the ranks: the prepared folders, as JSON

KEY = "training.token_folder"

HELD_OUT_TOKENS = 1 << 24  # of a Hub dataset's split, unless validation reads all of it


@dataclass(frozen=True)
class Part:
    """A corpus of a run."""

    name: str  # in logs
    weight: float  # its share of the sequences (of 1)
    sources: tuple[Source, ...]
    folder: str = ""  # of its tokens; empty until it is prepared


@dataclass(frozen=True)
class Validation:
    """A validation set of a run."""

    name: str  # in the keys of its metrics; empty for the set of ``[validation]`` itself
    dataset: str
    path: str | None
    steps: int  # the most batches per rank; -1 for all


def validation_sets(config: Any) -> dict[str, Validation]:
    """Return a run's validation sets by their tables' keys: ``[validation]``, then its ``sets``."""
    own = config.validation
    found = {"validation": Validation("", own.dataset, own.dataset_path, own.steps)}
    for index, entry in enumerate(_checked("validation.sets", own.sets, SET_KEYS)):
        name, path = entry.get("name") or entry["dataset"], entry.get("dataset_path")
        steps = entry.get("steps", own.steps)
        found[f"validation.sets[{index}]"] = Validation(name, entry["dataset"], path, steps)
    return found


def wanted(config: Any, section: str = "training") -> list[Part]:
    """Return what a run's ``JobConfig`` or record trains on, or reads for a validation set."""
    validation = validation_sets(config).get(section)
    if validation is not None and validation.dataset != "training":
        entries = [asdict(validation)]
    else:
        path, want = validation and validation.path, f"no path, or {section}.dataset = 'local'"
        require(not path, f"{section}.dataset_path", path, f"{want} with it")
        entries, section = _entries(config.training), "training"
    weights = [float(entry.get("weight", 1)) for entry in entries]
    found = []
    for entry, weight in zip(entries, weights, strict=True):
        share, name = weight / sum(weights), entry["dataset"]
        sources = _sources(entry, section, config, share)
        folder = str(data_path(entry["path"], sources[0].key)) if name == "prepared" else ""
        found.append(Part(entry.get("name") or name, share, sources, folder))
    return found


def used_sections(config: Any) -> tuple[str, ...]:
    """Return ``training``, and the tables of the validation sets that a run reads."""
    return ("training", *validation_sets(config)) if config.validation.enable else ("training",)


def ensure_prepared(config: Any, *sections: str) -> list[Part]:
    """Return the corpora of a run with their folders, after preparing those that are missing.

    The launcher tells its ranks the folders. Elsewhere the first process prepares the corpora and
    other processes wait. Errors are those of `prepare_folder`.
    """
    known = json.loads(os.environ.get(PREPARED, "{}"))
    found = list[tuple[Part, list[Reader]]]()  # readers where a folder is missing
    for section in sections or ("training",):
        for part in wanted(config, section):
            folder = part.folder or known.get(repr(part.sources), "")
            # Looks for all files before the first corpus is prepared: that may take hours.
            readers = [] if folder else [Reader(source) for source in part.sources]
            found.append((replace(part, folder=folder), readers))
    return [replace(p, folder=_prepared(config, files)) if files else p for p, files in found]


def is_prepared(config: Any) -> bool:
    """Return whether the tokens of a run are there, so that none would be prepared."""
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    for section in used_sections(config):
        for part in wanted(config, section):
            readers = [] if part.folder else [Reader(source) for source in part.sources]
            if readers and not (_place(config, readers, tokenizer) / RECORD).is_file():
                return False
    return True


def find_prepared(config: Any, section: str) -> list[Part]:
    """Find the tokens of somebody's run; its record may name any folder, corpus or limit.

    Nothing is downloaded, and nothing is written where the record says. Text on this machine is
    prepared in a temporary folder where its tokens are missing.
    """
    found = []
    for part in wanted(config, section):
        if part.folder:
            found.append(part)
            continue
        readers = [Reader(each) for each in part.sources]
        tokenizer = build_tokenizer(config.model.hf_assets_path)
        folder = _place(config, readers, tokenizer)
        if not (folder / RECORD).is_file():
            want = "tokens that are prepared here, since reading a run downloads none: name a text"
            want += " with --corpus"
            name = ", ".join(map(str, part.sources))
            require(part.sources[0].name != "hf", f"{section}.dataset", name, want)
            temporary = tempfile.mkdtemp(prefix="torchtitan_lr-")
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            folder, most = Path(temporary, "tokens"), config.training.max_bad_records
            prepare_folder(readers, tokenizer, folder, f"{section}.dataset", most)
        found.append(replace(part, folder=str(folder)))
    return found


def described(name: str, corpus: Corpus) -> str:
    """Say how many documents of a corpus are held out, and why so many of a small one."""
    held = sum(shard.documents for shard in corpus.held_out)
    number = held + sum(shard.documents for shard in corpus.train)
    what = "documents" if corpus.kind == "text" else "pairs or chats"
    line = f"{name}: {held:,} of {number:,} {what} are held out for validation"
    line += f" ({corpus.tokens(True):,} of {corpus.tokens(True) + corpus.tokens():,} tokens)"
    return line + "; 1 in 200 of a corpus above 8 MiB" * holds_out_more(corpus)


def holds_out_more(corpus: Corpus) -> bool:
    """Return whether a corpus was so small that more than the usual share is held out."""
    return any(share > 1 / ONE_IN for share in corpus.record.get("held_out_share", ()))


def open_rows(config: Any, section: str, parts: Sequence[Part] | None = None) -> list[Rows]:
    """Open the corpora of a run: what it trains on, or the held-out part of a validation set.

    By default `ensure_prepared` prepares what is missing. A part without a whole row is refused.
    """
    masked = config.training.mask_documents
    held_out = section != "training"
    seq_len = (config.validation if held_out else config.training).seq_len
    opened = []
    for part in ensure_prepared(config, section) if parts is None else parts:
        corpus = Corpus.open(part.folder)
        want = "another corpus, or false for validation.enable: nothing of it is held out"
        require(not held_out or corpus.held_out, f"{section}.dataset", part.name, want)
        opened.append(Rows(corpus, seq_len, held_out, masked, part.name, part.weight))
    return opened


def prepare_for_ranks(config: Any) -> dict[str, str]:
    """Prepare and check all folders of a run, and return environment variables for its ranks."""
    parts = ensure_prepared(config, *used_sections(config))
    for folder, name in {part.folder: part.name for part in parts}.items():
        corpus = Corpus.open(folder)
        corpus.check()
        if holds_out_more(corpus):
            say(described(name, corpus))
    return {PREPARED: json.dumps({repr(part.sources): part.folder for part in parts})}


def _sources(entry: dict[str, Any], section: str, config: Any, share: float) -> tuple[Source, ...]:
    """Return what is prepared for a corpus, which has a share of the sequences."""
    name, path, key = entry["dataset"], entry.get("path"), f"{section}.dataset_path"
    names = TRAINING if section == "training" else VALIDATION
    require(name in names, f"{section}.dataset", name, one_of(names, name))
    is_library, is_hub = name in LIBRARIES, name in ("hf", "c4")
    require(not (path and is_library), key, path, f"no path, or {section}.dataset = 'local'")
    require(path or name not in PATHS, key, path, PATHS.get(name, ""))
    if path and (name == "prepared" or (is_hub and path[0] in "/.~")):
        require(data_path(path, key).is_dir(), key, path, f"a folder of {name} that exists")
    options = vars(config.training) | (C4 if name == "c4" else {}) | entry
    source = Source(name, (path,) if path else (), key, column=options["text_column"])
    if section != "training" and not is_library:
        source = replace(source, part="held_out")
    if not is_hub:
        return (source,)
    tokens, held_out = _tokens(config, share) if config.training.hf_streaming else (None, None)
    source = replace(source, name="hf", paths=(path or C4_NAME,), config=options["hf_name"])
    source = replace(source, streaming=config.training.hf_streaming)
    first = replace(source, split=options["hf_split"], tokens=tokens)
    if not options["hf_held_out"]:
        return (first,)
    second = replace(source, split=options["hf_held_out"], part="held_out", tokens=held_out)
    return replace(first, part="train"), second


def _entries(training: Any) -> list[dict[str, Any]]:
    """Return the checked entries of ``training.mixture``; a single corpus is one entry."""
    entries = _checked("training.mixture", training.mixture, KEYS)
    if not entries:
        return [{"dataset": training.dataset, "path": training.dataset_path}]
    want = "no path beside [[training.mixture]], whose entries have their own"
    require(not training.dataset_path, "training.dataset_path", training.dataset_path, want)
    return entries


def _checked(key: str, tables: Sequence[Any], keys: Collection[str]) -> list[dict[str, Any]]:
    """Return the checked tables of a list, each of which names a dataset."""
    entries = [entry if isinstance(entry, dict) else vars(entry) for entry in tables]
    for index, entry in enumerate(entries):
        for name, value in ({"dataset": ""} | entry).items():
            holds, want = bool(value) and isinstance(value, str), "a string"
            if name == "weight":
                holds = type(value) in (int, float) and 0 < value < math.inf
                want = "a positive number"
            elif name == "steps":
                holds = type(value) is int and (value == -1 or value > 0)
                want = "a positive integer, or -1 for all"
            elif name == "name" and keys is SET_KEYS:  # in keys of metrics and in lines
                holds = holds and re.fullmatch(r"[\w.-]+", value) is not None
                want = "letters, digits, '.', '_' and '-'"
            want = want if name in keys else "one of the keys " + ", ".join(keys)
            require(holds and name in keys, f"{key}[{index}].{name}", value, want)
    names = [entry.get("name") or entry["dataset"] for entry in entries]
    want = "entries with different names; two of one dataset need name = '...'"
    require(len(set(names)) == len(names), key, names, want)
    return entries


def _tokens(config: Any, share: float) -> tuple[int, int | None]:
    """Return how many tokens to prepare of the Hub: to train on, and held out (None for all).

    The first are a share of ``training.hf_tokens``, else of those of all steps and of one step
    more. Without a ``training.global_batch_size`` the batch is that of one data-parallel rank.
    """
    training, section = config.training, config.validation
    batch = max(training.global_batch_size, 0) or training.local_batch_size
    steps = (training.steps + 1) * batch * (training.seq_len + 1)
    # Not of `sets`: one more would be another corpus, with which a checkpoint does not go on.
    held_out = None if section.enable and section.steps < 0 else HELD_OUT_TOKENS
    return math.ceil(share * (training.hf_tokens or steps)), held_out


def _prepared(config: Any, readers: Sequence[Reader]) -> str:
    """Return the folder of a part; prepare it if needed."""
    tokenizer = build_tokenizer(config.model.hf_assets_path)
    folder = _place(config, readers, tokenizer)
    is_new = not (folder / RECORD).is_file()
    if is_new:
        names = ", ".join(str(reader.source) for reader in readers)
        say(f"preparing the tokens of {names} in {folder}")
    corpus = prepare_folder(readers, tokenizer, folder, KEY, config.training.max_bad_records)
    if is_new:
        for bad in corpus.record["bad_records"][:20]:
            say(f"warning: left out {bad}")
        say(f"prepared {corpus.tokens():,} tokens to train on and {corpus.tokens(True):,} held out")
        with suppress(OSError):  # of a file that is gone since
            size = sum(file.stat().st_size for file in folder.parent.rglob("*")) / 1e9
            say(f"prepared tokens take {size:,.2f} GB in {folder.parent}; no run deletes them")
    return str(folder)


def _place(config: Any, readers: Sequence[Reader], tokenizer: Tokenizer) -> Path:
    """Return the folder of a part in the shared store; it may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    store = data_path(config.training.token_folder or f"{cache}/torchtitan_lr/tokens", KEY)
    return store / f"{readers[0].source.name}-{signature_of(readers, tokenizer)[:20]}"
