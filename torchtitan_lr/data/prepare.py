# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The prepared tokens of a run: which sources it reads, and the folders that hold their tokens.

A run reads prepared tokens only. Those of a raw corpus are prepared once, before any rank starts,
into ``training.token_folder``, which all runs of a user share. The name of a folder there is a hash
of all that determines its content: the files with what is in them, the tokenizer, the rule of the
held-out part. So a folder is never changed, and who reads it needs no lock. Who prepares it has a
lock alone, which only saves work: two that prepare one folder write the same bytes.

What is prepared does not depend on the number of ranks: one process evaluates what 64 train on.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.log import duration, say
from torchtitan_lr.data.corpus import BEGUN, RECORD, Corpus, Rows
from torchtitan_lr.data.sources import LIBRARIES, ONE_IN, Reader, Source, data_path
from torchtitan_lr.data.template import ChatTemplate
from torchtitan_lr.data.tokenize import signature_of, threads_of, tokenize
from torchtitan_lr.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_lr.errors import ConfigError, one_of, require

TRAINING = (*LIBRARIES, "local", "prepared", "c4", "c4_validation", "hf")
VALIDATION = ("training", *LIBRARIES, "local", "c4_validation")

PATHS = {  # what must be named
    "local": "a file, folder or pattern of .txt, .jsonl or .parquet",
    "hf": "a dataset of the Hub such as 'owner/name', or a folder of one",
    "prepared": "a folder that `torchtitan-lr prepare` or Megatron-LM wrote",
}

C4_NAME = "allenai/c4"
C4 = {
    "c4": {"hf_name": "en", "hf_split": "train", "hf_held_out": "validation"},
    "c4_validation": {"hf_name": "en", "hf_split": "validation", "hf_held_out": ""},
}
KEYS = {"dataset": "a corpus such as 'local'", "weight": "a positive number such as 0.5"}
KEYS |= dict.fromkeys(["path", "name", "text_column", "hf_name", "hf_split"], "a string")
"""Keys of an entry of `training.mixture`; the last three replace `training`'s keys."""

PREPARED = "TORCHTITAN_LR_PREPARED"
"""Environment variable of the ranks: the folders that the launcher has prepared, as JSON."""

KEY = "training.token_folder"

Section = Literal["training", "validation"]

HELD_OUT_TOKENS = 1 << 24
"""Tokens to prepare of a Hub dataset's held-out split, unless validation reads all of it."""

TOKENS_PER_SECOND = 90_000
"""Tokens that a core prepares in a second, for estimates: 7 hours of a core for the 2.2 billion
tokens of CoLA-130M."""

BYTES_PER_TOKEN = 4
"""Of text on this machine, for estimates alone; compressed text has more tokens per byte."""

LONG_SECONDS = 600
"""A longer preparation is said before it starts."""

LOCK = ".lock"
"""File in a folder, locked by who prepares it."""


@dataclass(frozen=True)
class Part:
    """A corpus of a run."""

    name: str  # in logs
    weight: float  # its share of the sequences (of 1)
    sources: tuple[Source, ...]
    folder: str = ""  # of its tokens; empty until it is prepared


def wanted(config: Any, section: Section = "training") -> list[Part]:
    """Return what a section of a run's ``JobConfig`` or record reads.

    Raises:
        ConfigError: An unknown corpus, or a path that is missing, unused or does not exist.
    """
    training, validation = config.training, config.validation
    tokens, held_out = _tokens(config)
    if section == "validation" and validation.dataset != "training":
        entries, tokens = [{"dataset": validation.dataset, "path": validation.dataset_path}], 0
    else:
        path, want = validation.dataset_path, "no path, or validation.dataset = 'local' with it"
        require(section == "training" or not path, "validation.dataset_path", path, want)
        entries, section = _entries(training), "training"
    weights = [float(entry.get("weight", 1)) for entry in entries]
    found = []
    for entry, weight in zip(entries, weights, strict=True):
        share, name = weight / sum(weights), entry["dataset"]
        sources = _sources(entry, section, training, math.ceil(share * tokens), held_out)
        folder = str(data_path(entry["path"], sources[0].key)) if name == "prepared" else ""
        found.append(Part(entry.get("name") or name, share, sources, folder))
    return found


def used_sections(config: Any) -> tuple[Section, ...]:
    """Return the sections of a run's ``JobConfig`` or record whose corpora it reads."""
    return ("training", "validation") if config.validation.enable else ("training",)


def ensure_prepared(
    config: Any, *sections: Section, folders: dict[str, str] | None = None
) -> list[Part]:
    """Return the corpora of a run with their folders, after preparing those that are missing.

    The launcher tells its ranks the folders. Elsewhere the first process prepares the corpora and
    other processes wait. ``folders`` is what `find_prepared` found; by default what the launcher
    has prepared.

    Raises:
        ConfigError: As for `wanted` and `tokenize`.
        DataError: As for `tokenize`.
    """
    parts = [part for section in sections or ("training",) for part in wanted(config, section)]
    known = json.loads(os.environ.get(PREPARED, "{}")) if folders is None else folders
    places = [known.get(repr(part.sources)) or part.folder for part in parts]
    readers: list[list[Reader]] = []
    for part, place in zip(parts, places, strict=True):
        # Looks for all files before the first corpus is prepared: that may take hours.
        readers.append([] if place else [Reader(source) for source in part.sources])
    found = []
    for part, place, own in zip(parts, places, readers, strict=True):
        found.append(replace(part, folder=place or _prepared(config, part, own)))
    return found


def find_prepared(config: Any, section: Section) -> dict[str, str]:
    """Find the tokens of somebody's run; its record may name any folder, corpus or limit.

    Nothing is downloaded, and nothing is written where the record says. Text on this machine is
    prepared in a temporary folder where its tokens are missing.

    Raises:
        ConfigError: It is a dataset of the Hub whose tokens are not prepared on this machine.
    """
    found: dict[str, str] = {}
    for part in wanted(config, section):
        if part.folder:
            continue
        readers, tokenizer = [Reader(source) for source in part.sources], build_tokenizer(config)
        folder = _place(config, part, readers, tokenizer)
        if not (folder / RECORD).is_file():
            want = "tokens that are prepared here, since reading a run downloads none: name a text"
            want += " with --corpus"
            name = ", ".join(map(str, part.sources))
            require(part.sources[0].name != "hf", f"{section}.dataset", name, want)
            temporary = tempfile.mkdtemp(prefix="torchtitan_lr-")
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            folder = Path(temporary) / "tokens"
            most = config.training.max_bad_records
            prepare_folder(readers, tokenizer, folder, f"{section}.dataset", most)
        found[repr(part.sources)] = str(folder)
    return found


def described_pairs(name: str, corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Say how many pairs or chats a corpus has, in which form, and the share of their labels."""
    documents = sum(shard.documents for shard in corpus.train)
    labels = sum(int(corpus.shard(shard, loss=True).read().sum()) for shard in corpus.train)
    share = labels / max(1, corpus.tokens())
    form = "the tokenizer's template" if ChatTemplate(tokenizer).digest else "headings and texts"
    return (
        f"{name}: {documents:,} pairs or chats (chats as {form}), {corpus.tokens():,} tokens, of"
        f" which {share:.1%} are answers, which alone count in the loss"
    )


def described_held_out(name: str, corpus: Corpus) -> str:
    """Say how many documents of a corpus are held out, and why so many of a small one."""
    held = sum(shard.documents for shard in corpus.held_out)
    documents = held + sum(shard.documents for shard in corpus.train)
    line = f"{name}: {held:,} of {documents:,} documents are held out for validation"
    line += f" ({corpus.tokens(True):,} of {corpus.tokens(True) + corpus.tokens():,} tokens)"
    return line + "; 1 in 200 of a corpus above 8 MiB" * holds_out_more(corpus)


def holds_out_more(corpus: Corpus) -> bool:
    """Return whether a corpus was so small that more than the usual share is held out."""
    return any(share > 1 / ONE_IN for share in corpus.record.get("held_out_share", ()))


def open_rows(config: Any, section: Section, folders: dict[str, str] | None = None) -> list[Rows]:
    """Open the corpora of a run: what it trains on, or the held-out part that it validates on.

    Arguments and errors are those of `ensure_prepared`, which prepares what is missing; a part
    without a whole row is a ConfigError too.
    """
    masked = getattr(config.training, "mask_documents", False)
    seq_len, held_out = getattr(config, section).seq_len, section == "validation"
    opened = []
    for part in ensure_prepared(config, section, folders=folders):
        corpus = Corpus.open(part.folder)
        want = "another corpus, or false for validation.enable: nothing of it is held out"
        require(not held_out or corpus.held_out, "validation.dataset", part.name, want)
        opened.append(Rows(corpus, seq_len, held_out, masked, part.name, part.weight))
    return opened


def prepare_for_ranks(config: Any) -> dict[str, str]:
    """Prepare and check all folders of a run, and return environment variables for its ranks.

    Errors are those of :func:`ensure_prepared`; a damaged folder is a DataError too.
    """
    parts = ensure_prepared(config, *used_sections(config))
    known = {repr(part.sources): part.folder for part in parts}
    for folder in set(known.values()):
        Corpus.open(folder).check()
    for name, folder in {part.name: part.folder for part in parts}.items():
        corpus = Corpus.open(folder)
        if corpus.kind == "pairs":
            say(described_pairs(name, corpus, build_tokenizer(config)))
        if holds_out_more(corpus):
            say(described_held_out(name, corpus))
    return {PREPARED: json.dumps(known)}


def _sources(
    entry: dict[str, Any], section: Section, training: Any, tokens: int, held_out: int | None
) -> tuple[Source, ...]:
    """Return what is prepared for a corpus: of a dataset of the Hub up to so many tokens."""
    name, path, key = entry["dataset"], entry.get("path"), f"{section}.dataset_path"
    names = VALIDATION if section == "validation" else TRAINING
    require(name in names, f"{section}.dataset", name, one_of(names, name))
    is_library, is_hub = name in LIBRARIES, name == "hf" or name in C4
    require(not (path and is_library), key, path, f"no path, or {section}.dataset = 'local'")
    require(path or name not in PATHS, key, path, PATHS.get(name, ""))
    if path and (name == "prepared" or (is_hub and path[0] in "/.~")):
        require(data_path(path, key).is_dir(), key, path, f"a folder of {name} that exists")
    options = vars(training) | C4.get(name, {}) | entry
    source = Source(name, (path,) if path else (), key, column=options["text_column"])
    if section == "validation" and not is_library:
        source = replace(source, part="held_out")
    if not is_hub:
        return (source,)
    stream, other = training.hf_streaming, options["hf_held_out"]
    source = replace(source, name="hf", paths=(path or C4_NAME,), config=options["hf_name"])
    source = replace(source, split=options["hf_split"], streaming=stream)
    first = replace(source, tokens=tokens or held_out if stream else None)
    if not other:
        return (first,)
    second = replace(source, split=other, part="held_out", tokens=held_out if stream else None)
    return replace(first, part="train"), second


def _entries(training: Any) -> list[dict[str, Any]]:
    """Return the checked entries of ``training.mixture``; a single corpus is one entry."""
    given = getattr(training, "mixture", None) or []
    entries = [entry if isinstance(entry, dict) else vars(entry) for entry in given]
    if not entries:
        return [{"dataset": training.dataset, "path": training.dataset_path}]
    want = "no path beside [[training.mixture]], whose entries have their own"
    require(not training.dataset_path, "training.dataset_path", training.dataset_path, want)
    for index, entry in enumerate(entries):
        for name, value in ({"dataset": ""} | entry).items():
            want = KEYS.get(name, "one of the keys " + ", ".join(KEYS))
            holds = name in KEYS and isinstance(value, str) and (value or name != "dataset")
            if name == "weight":
                holds = type(value) in (int, float) and 0 < value < math.inf
            require(holds, f"training.mixture[{index}].{name}", value, want)
    names = [entry.get("name") or entry["dataset"] for entry in entries]
    want = "entries with different names; two of one dataset need name = '...'"
    require(len(set(names)) == len(names), "training.mixture", names, want)
    return entries


def _tokens(config: Any) -> tuple[int, int | None]:
    """Return how many tokens to prepare of the Hub: to train on, and held out (None for all).

    The first are ``training.hf_tokens``, else those of all steps and of one step more. Without a
    ``training.global_batch_size`` the batch counts as that of one data-parallel rank.
    """
    training, section = config.training, config.validation
    batch = max(training.global_batch_size, 0) or training.local_batch_size
    steps = (training.steps + 1) * batch * (training.seq_len + 1)
    # Records of earlier runs lack the key.
    tokens = int(getattr(training, "hf_tokens", 0) or steps)
    return tokens, None if section.enable and section.steps < 0 else HELD_OUT_TOKENS


def _prepared(config: Any, part: Part, readers: Sequence[Reader]) -> str:
    """Return the folder of a part; prepare it if needed."""
    tokenizer = build_tokenizer(config)
    folder = _place(config, part, readers, tokenizer)
    is_new = not (folder / RECORD).is_file()
    if is_new:
        say(f"preparing the tokens of {', '.join(map(str, part.sources))} in {folder}")
        workers = max(1, threads_of(readers, tokenizer))
        if (seconds := preparing_seconds(readers, workers)) > LONG_SECONDS:
            say(
                f"that takes about {duration(seconds)} (cores used: {workers}), while the run's"
                " devices wait: the same command with COMM_MODE=fake_backend prepares it first, on"
                f" a machine without GPUs that shares {KEY}"
            )
    corpus = prepare_folder(readers, tokenizer, folder, KEY, config.training.max_bad_records)
    if is_new:
        for line in losses(corpus):
            say(f"warning: {line}")
        say(f"prepared {corpus.tokens():,} tokens to train on and {corpus.tokens(True):,} held out")
        size = _gigabytes(folder.parent)
        say(f"prepared tokens take {size:,.2f} GB in {folder.parent}; no run deletes them")
    return str(folder)


def _gigabytes(folder: Path) -> float:
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # another user's, or gone since
            size += file.stat().st_size
    return size / 1e9


def _place(config: Any, part: Part, readers: Sequence[Reader], tokenizer: Tokenizer) -> Path:
    """Return the folder of a part in the shared store; it may not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    store = data_path(config.training.token_folder or f"{cache}/torchtitan_lr/tokens", KEY)
    return store / f"{part.sources[0].name}-{signature_of(readers, tokenizer)[:20]}"


def preparing_seconds(readers: Sequence[Reader], workers: int) -> float:
    """Estimate how long cores prepare sources: 0 for what has an unknown size."""
    tokens = 0.0
    for reader in readers:
        if reader.source.tokens is not None:
            tokens += reader.source.tokens
        else:
            tokens += sum(file.stat().st_size for file in reader.files) / BYTES_PER_TOKEN
    return tokens / (TOKENS_PER_SECOND * workers)


def losses(corpus: Corpus, most: int = 20) -> list[str]:
    """Return a line for each of the first records that were left out, and one for those changed."""
    lines = [f"left out {bad}" for bad in corpus.record["bad_records"][:most]]
    if count := corpus.record["changed_records"]:
        lines.append(f"{count:,} records have half of a character (a lone surrogate), now '?'")
    return lines


def prepare_folder(
    readers: Sequence[Reader],
    tokenizer: Tokenizer,
    folder: Path,
    key: str,
    max_bad_records: int = 0,
) -> Corpus:
    """Prepare a folder unless it is prepared; a second process waits for the first.

    Raises:
        ConfigError: As for `tokenize`; the folder was prepared from something else, or with more
            lost records than may be.
        DataError: As for `tokenize`.
    """
    signature = signature_of(readers, tokenizer)
    if not (folder / RECORD).is_file():
        _require_free(folder, signature, key)
        with _alone(folder, key):
            if not (folder / RECORD).is_file():  # another run may have prepared it meanwhile
                _require_free(folder, signature, key)  # or have begun it
                tokenize(readers, tokenizer, folder, key=key, max_bad_records=max_bad_records)
    corpus = Corpus.open(folder, key)
    want = "another folder: it was prepared from other sources, or with another tokenizer"
    require(corpus.record.get("signature") == signature, key, str(folder), want)
    lost = len(corpus.record["bad_records"])
    want = f"training.max_bad_records = {lost}: {folder / RECORD} lists what was left out"
    require(lost <= max_bad_records, "training.max_bad_records", max_bad_records, want)
    return corpus


def _require_free(folder: Path, signature: str, key: str) -> None:
    """Refuse a folder that holds anything but the begun preparation of a signature."""
    with suppress(OSError, ValueError):
        if read_json(folder / BEGUN).get("signature") == signature:
            return
    names = os.listdir(folder) if folder.is_dir() else []
    foreign = next((name for name in names if name not in (LOCK, BEGUN)), None)
    want = f"a folder that is new, empty or was begun by this command; it holds {foreign!r}"
    require(foreign is None, key, str(folder), want)


@contextmanager
def _alone(folder: Path, key: str) -> Iterator[None]:
    """Lock a folder to prepare it; without a lock where its file system has none."""
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"waiting for another run, which prepares {folder}")
            lock.acquire()
    except NotImplementedError:
        pass
    except OSError as error:
        want = f"a folder that can be written ({error.strerror})"
        raise ConfigError(key, str(folder), want) from error
    try:
        yield
    finally:
        lock.release()
