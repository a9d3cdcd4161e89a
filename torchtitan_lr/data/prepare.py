# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The prepared tokens of a run: which sources it reads, and the folders that hold their tokens.

A run reads prepared tokens only. Those of a raw corpus are prepared once, before any rank starts,
into ``training.token_folder``, which all runs of a user share. The name of a folder there is a hash
of all that determines its content: the files with their sizes and times, the tokenizer, the rule
of the held-out part. A run locks the folders that it reads, and shares these locks with other runs;
who prepares a folder has its lock alone. Locks are the kernel's (``flock``), so none outlives its
process. On a file system without locks two runs may prepare the same folder at once: each machine
writes into a folder of its own, and the first to be ready is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from torchtitan_lr.console.log import say
from torchtitan_lr.console.progress import Preparing
from torchtitan_lr.data.corpus import RECORD, Corpus
from torchtitan_lr.data.sources import LIBRARIES, Reader, Source, data_path
from torchtitan_lr.data.tokenize import signature_of, tokenize
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

TRAINING = (*LIBRARIES, "local", "prepared", "c4", "c4_validation", "hf")
VALIDATION = ("training", *LIBRARIES, "local", "c4_validation")

PATHS = {  # what must be named
    "local": "a file, folder or pattern of .txt, .jsonl or .parquet",
    "hf": "a dataset of the Hub such as 'owner/name', or a folder of one",
    "prepared": "a folder that `torchtitan-lr prepare` or Megatron-LM wrote",
}

C4 = "allenai/c4"
C4_SPLITS = {"c4": ("en", "train", "validation"), "c4_validation": ("en", "validation", "")}

# Keys of an entry of `training.mixture`: those that replace the run's, and all with their types.
OPTIONS = {"text_column": "column", "hf_name": "config", "hf_split": "split"}
KEYS: dict[str, Any] = {"dataset": str, "path": str, "weight": (int, float), "name": str}
KEYS |= dict.fromkeys(OPTIONS, str)

PREPARED = "TORCHTITAN_LR_PREPARED"
"""Environment variable of the ranks: the folders that the launcher has prepared, as JSON."""

KEY = "training.token_folder"

Section = Literal["training", "validation"]


@dataclass(frozen=True)
class Part:
    """A prepared folder of a run, its name in logs, and its share of the sequences (of 1)."""

    folder: Path
    name: str
    weight: float


@dataclass(frozen=True)
class Wanted:
    """What must be prepared for a :class:`Part`; its folder if that is done (``prepared``)."""

    name: str
    weight: float
    sources: tuple[Source, ...]
    folder: Path | None = None


def wanted(config: Any, section: Section = "training", world_size: int = 1) -> list[Wanted]:
    """Return what a section of a run's ``JobConfig`` or record reads.

    Of a dataset of the Hub the ranks of the run determine how much is prepared.

    Raises:
        ConfigError: An unknown corpus, or a path that is missing, unused or does not exist.
    """
    training, validation = config.training, config.validation
    entries: list[dict[str, Any]] = []
    tokens, key = 0, section
    if section == "training" or validation.dataset == "training":
        if section == "validation" and validation.dataset_path:
            want = "no path, or validation.dataset = 'local' with it"
            raise ConfigError("validation.dataset_path", validation.dataset_path, want)
        entries, tokens, key = _entries(training), _training_tokens(config, world_size), "training"
    else:
        entries = [{"dataset": validation.dataset, "path": validation.dataset_path}]
    held_out = _validation_tokens(config, world_size)
    total = sum(float(entry.get("weight", 1)) for entry in entries)
    found = []
    for entry in entries:
        weight = float(entry.get("weight", 1)) / total
        amount = math.ceil(weight * tokens)
        name, path = entry["dataset"], entry.get("path")
        sources = _sources(name, path, key, training, amount, held_out)
        own = {option: entry[key] for key, option in OPTIONS.items() if key in entry}
        folder = data_path(str(path), f"{key}.dataset_path") if name == "prepared" else None
        sources = tuple(replace(source, **own) for source in sources)
        found.append(Wanted(entry.get("name") or name, weight, sources, folder))
    return found


def ensure_prepared(
    config: Any, section: Section = "training", world_size: int | None = None
) -> list[Part]:
    """Return the prepared folders of a run, after preparing those that are missing.

    In a rank of the launcher they are known. Elsewhere the first process prepares them and others
    wait. The folders stay locked until the process ends. Errors are those of :func:`wanted` and
    :func:`tokenize`; ``world_size`` is that of the environment by default.
    """
    parts = wanted(config, section, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    known = json.loads(os.environ.get(PREPARED, "{}")).get(_digest(parts))
    folders = known or [part.folder or _prepared(config, part) for part in parts]
    named = zip(parts, folders, strict=True)
    return [Part(Path(folder), part.name, part.weight) for part, folder in named]


def prepare_for_ranks(config: Any, world_size: int) -> dict[str, str]:
    """Prepare and check all folders of a run, and return environment variables for its ranks.

    Raises:
        ConfigError: As for :func:`ensure_prepared`.
        DataError: Also a prepared folder that is damaged.
    """
    sections: list[Section] = ["training", "validation"]
    known: dict[str, list[str]] = {}
    for section in sections[: 1 + bool(config.validation.enable)]:
        parts = ensure_prepared(config, section, world_size)
        digest = _digest(wanted(config, section, world_size))
        known[digest] = [str(part.folder) for part in parts]
    for folder in {folder for folders in known.values() for folder in folders}:
        Corpus.open(folder).check()
    return {PREPARED: json.dumps(known)}


def _digest(parts: list[Wanted]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _sources(
    name: str, path: str | None, section: str, training: Any, tokens: int, held_out: int | None
) -> tuple[Source, ...]:
    """Return what is prepared for a corpus: of a dataset of the Hub up to so many tokens."""
    key, names = f"{section}.dataset_path", VALIDATION if section == "validation" else TRAINING
    is_hub = name == "hf" or name in C4_SPLITS
    if name not in names:
        raise ConfigError(f"{section}.dataset", name, "one of " + ", ".join(names))
    if name in LIBRARIES and path:
        raise ConfigError(key, path, f"no path, or {section}.dataset = 'local'")
    if name in PATHS and not path:
        raise ConfigError(key, path, PATHS[name])
    is_folder = name == "prepared" or (is_hub and path and path[0] in "/.~")
    if is_folder and path and not data_path(path, key).exists():
        raise ConfigError(key, path, f"a folder of {name} that exists")
    source = Source(name, (path,) if path else (), key, column=training.text_column)
    if section == "validation" and name not in LIBRARIES:
        source = replace(source, part="held_out")
    if not is_hub:
        return (source,)
    usual = (training.hf_name, training.hf_split, training.hf_held_out)
    config, split, other = C4_SPLITS.get(name, usual)
    stream = training.hf_streaming
    source = replace(source, name="hf", paths=(path or C4,), config=config, streaming=stream)
    first = replace(source, split=split, tokens=tokens or held_out if stream else None)
    if not other:
        return (first,)
    second = replace(source, split=other, part="held_out", tokens=held_out if stream else None)
    return replace(first, part="train"), second


def _entries(training: Any) -> list[dict[str, Any]]:
    """Return ``training.mixture`` after checks, or the one corpus as an entry of it."""
    given = getattr(training, "mixture", None) or []
    entries = [entry if isinstance(entry, dict) else vars(entry) for entry in given]
    if not entries:
        return [{"dataset": training.dataset, "path": training.dataset_path}]
    if training.dataset_path:
        want = "no path beside [[training.mixture]], whose entries have their own"
        raise ConfigError("training.dataset_path", training.dataset_path, want)
    for index, entry in enumerate(entries):
        key = f"training.mixture[{index}]"
        for name, value in entry.items():
            if name not in KEYS:
                raise ConfigError(f"{key}.{name}", value, "one of the keys " + ", ".join(KEYS))
            if not isinstance(value, KEYS[name]) or isinstance(value, bool):
                kind = "a number" if name == "weight" else "a string"
                raise ConfigError(f"{key}.{name}", value, kind)
        if "dataset" not in entry:
            raise ConfigError(f"{key}.dataset", "", "a corpus such as 'local'")
        if not 0 < float(entry.get("weight", 1)) < math.inf:
            raise ConfigError(f"{key}.weight", entry["weight"], "a positive number such as 0.5")
    names = [entry.get("name") or entry["dataset"] for entry in entries]
    if len(set(names)) < len(names):
        want = "entries with different names; two of one dataset need name = '...'"
        raise ConfigError("training.mixture", names, want)
    return entries


def data_ranks(config: Any, world_size: int) -> int:
    """Return the data-parallel degree of a run."""
    layout, kinds = config.parallelism, ("tensor", "pipeline", "context")
    degrees = (getattr(layout, f"{kind}_parallel_degree") for kind in kinds)
    return max(1, world_size // math.prod(degrees))


def _training_tokens(config: Any, world_size: int) -> int:
    """Return ``training.hf_tokens``, else the tokens of all steps and of one step more."""
    training = config.training
    if tokens := getattr(training, "hf_tokens", 0):  # records of earlier runs lack it
        return int(tokens)
    rows = training.global_batch_size
    if rows < 0:
        rows = training.local_batch_size * data_ranks(config, world_size)
    return (training.steps + 1) * rows * (training.seq_len + 1)


def _validation_tokens(config: Any, world_size: int) -> int | None:
    """Return the tokens that one validation reads; None for all."""
    section = config.validation
    if not section.enable:
        return 1
    if section.steps < 0:
        return None
    rows = section.steps * section.local_batch_size * data_ranks(config, world_size)
    return rows * (section.seq_len + 1)


def _prepared(config: Any, part: Wanted) -> Path:
    """Return the folder of a part, locked until this process ends; prepare it if needed."""
    tokenizer = build_tokenizer(config)
    readers = [Reader(source) for source in part.sources]
    name = f"{part.sources[0].name}-{signature_of(readers, tokenizer)[:20]}"
    training, cache = config.training, os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    default = os.path.join(cache, "torchtitan_lr", "tokens")
    store, most = data_path(training.token_folder or default, KEY), training.max_bad_records
    folder = store / name
    is_new = not (folder / RECORD).is_file()
    if is_new:
        say(f"preparing the tokens of {', '.join(map(str, part.sources))} in {folder}")
    corpus = prepare_folder(readers, tokenizer, folder, key=KEY, max_bad_records=most)
    lost = corpus.record["bad_records"]
    if len(lost) > most:
        want = f"training.max_bad_records = {len(lost)}: {folder / RECORD} lists what was left out"
        raise ConfigError("training.max_bad_records", most, want)
    if is_new:
        for bad in lost[:20]:
            say(f"warning: left out {bad}")
        limit = training.token_folder_gb
        kept = free(store, limit * 1e9) / 1e9
        counts = f"{corpus.tokens():,} tokens to train on and {corpus.tokens(True):,} held out"
        say(f"prepared {counts}; {store} has {kept:,.2f} GB of at most {limit:g} GB")
    return folder


_held: dict[Path, IO[bytes]] = {}  # the locks of this process, by folder


def prepare_folder(
    readers: Sequence[Reader],
    tokenizer: HuggingFaceTokenizer,
    folder: Path,
    *,
    key: str,
    workers: int | None = None,
    max_bad_records: int,
) -> Corpus:
    """Prepare a folder unless it is prepared, and lock it until this process ends.

    A second process waits for the first. In the shared store, whose ``key`` is :data:`KEY`, each
    machine writes into a folder of its own, which is renamed. Arguments are those of
    :func:`tokenize`.

    Raises:
        ConfigError: The folder cannot be written, or was prepared from something else.
        DataError: As for :func:`tokenize`.
    """
    lock, scratch = folder / ".lock", folder
    if key == KEY:
        lock = folder.parent / "locks" / folder.name
        scratch = Path(f"{folder}.preparing-{socket.gethostname()}")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = _held.get(folder) or lock.open("ab")
    except OSError as error:
        want = f"a folder that can be written ({error.strerror})"
        raise ConfigError(key, str(lock.parent), want) from error
    waits = False
    while folder not in _held:
        ready = (folder / RECORD).is_file()
        # A reader keeps its lock while it trains: whoever waits to prepare must look again.
        if not _lock(file, fcntl.LOCK_SH if ready else fcntl.LOCK_EX):
            if not waits:
                say(f"waiting for another run, which prepares {folder}")
            waits = True
            time.sleep(0.2)
        elif ready != (folder / RECORD).is_file():
            continue  # it was prepared, or deleted, before this process had the lock
        elif ready:
            os.utime(lock)  # the time of the last use
            _held[folder] = file
        else:
            options: dict[str, Any] = {"workers": workers, "max_bad_records": max_bad_records}
            with closing(Preparing()) as shown:
                tokenize(readers, tokenizer, scratch, key=key, report=shown, **options)
            if scratch != folder:
                try:
                    os.rename(scratch, folder)
                except OSError:  # another machine was faster
                    shutil.rmtree(scratch)
    corpus = Corpus.open(folder, key)
    if corpus.record["signature"] != signature_of(readers, tokenizer):
        want = "another folder: it was prepared from other sources, or with another tokenizer"
        raise ConfigError(key, str(folder), want)
    return corpus


def _lock(file: IO[bytes], kind: int) -> bool:
    """Lock a file; return whether it is locked, or whether its file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def free(store: Path, limit: float) -> int:
    """Delete the folders that were not used for longest, until the others fit a limit in bytes.

    A folder that a run reads or prepares is kept, and so is every folder where the file system has
    no locks. Returns the bytes that are left.
    """
    locks = sorted((store / "locks").iterdir(), key=lambda lock: lock.stat().st_mtime)
    # The folder of each, and those of machines that prepare it.
    folders = {lock: list(store.glob(f"{lock.name}*")) for lock in locks}
    sizes = dict.fromkeys(locks, 0)
    for lock in locks:
        with suppress(FileNotFoundError):  # another run has just renamed or deleted its own
            files = (file for folder in folders[lock] for file in folder.iterdir())
            sizes[lock] = sum(file.stat().st_size for file in files)
    left = sum(sizes.values())
    for lock in locks:
        if left <= limit:
            break
        with suppress(OSError), lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in folders[lock]:
                shutil.rmtree(folder)
            left -= sizes[lock]
    return left
