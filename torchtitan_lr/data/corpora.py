# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What text to train on: the corpora by name, and the check that they are there.

``python_stdlib``
    The standard library's source files of the running interpreter: real text on every machine.
``local``
    Files of one's own: .txt, .jsonl or .parquet (:mod:`torchtitan_lr.data.local_corpus`).
``c4``, ``c4_validation``
    torchtitan's Hugging Face streams (:mod:`torchtitan_lr.data.hub_corpus`).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from torchtitan_lr.data.lanes import BlockStream, DocumentStream
from torchtitan_lr.data.paths import user_path
from torchtitan_lr.errors import ConfigError

TRAINING_CORPORA = ("python_stdlib", "local", "c4", "c4_validation")
VALIDATION_CORPORA = ("python_stdlib", "local", "c4_validation")

Split = Literal["train", "validation"]


class Corpus(Protocol):
    """A source of documents that can be read as lanes, or once from end to end."""

    name: str

    def fingerprint(self) -> str:
        """Return one line that differs when the corpus does; cheap, contents are not read."""
        ...

    def num_lanes(self, rows: int) -> int:
        """Return how many lanes serve a global batch of ``rows`` rows: a divisor of ``rows``."""
        ...

    def stream(self, lane: int, num_lanes: int, infinite: bool) -> DocumentStream:
        """Open one lane's documents."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Every document once, in a fixed order."""
        ...


class BlockCorpus(ABC):
    """A corpus cut into blocks that can be opened one by one, without reading the others.

    Args:
        name: The corpus's name in the TOML.
        key: The TOML key to name in errors.
        files: ``(name, bytes)`` of each file, in order; the fingerprint is made of these.
    """

    def __init__(self, name: str, key: str, files: Iterable[tuple[str, int]]) -> None:
        self.name = name
        self.key = key
        self._files = list(files)

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """How many blocks there are."""

    @abstractmethod
    def documents(self, block: int) -> Iterator[str]:
        """Yield the non-empty documents of one block, in order."""

    def fingerprint(self) -> str:
        """Return name, blocks, files, bytes and a hash of the files' names and sizes."""
        digest = hashlib.sha256(repr(self._files).encode()).hexdigest()[:16]
        size = sum(size for _, size in self._files)
        return (
            f"{self.name} blocks={self.num_blocks} files={len(self._files)} bytes={size} {digest}"
        )

    def num_lanes(self, rows: int) -> int:
        """Return ``rows``: blocks serve any number of lanes."""
        return rows

    def stream(self, lane: int, num_lanes: int, infinite: bool) -> DocumentStream:
        """Open one lane's documents (:class:`BlockStream`)."""
        return BlockStream(self, lane, num_lanes, infinite)

    def __iter__(self) -> Iterator[str]:
        """Yield every document once, block by block."""
        for block in range(self.num_blocks):
            yield from self.documents(block)


class PythonStdlib(BlockCorpus):
    """The .py files of the standard library, one block and one document each.

    In: every non-empty .py file under the interpreter's stdlib path, sorted by its relative path.
    Out: installed packages, and test suites (folders named test, tests, idle_test). A file
    belongs to the validation split iff ``sha256(relative path) mod 20 == 0``.

    Block by block they are read in the order of these hashes. In the order of their names, one
    batch would be all asyncio and the next all character tables, and the first batches of the
    validation split would say little about the rest.

    Args:
        split: Which files to take.
        key: The TOML key to name in errors.
        root: The library's folder; the running interpreter's by default.

    Raises:
        ConfigError: The interpreter has no library sources (some are built without).
    """

    EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

    def __init__(self, split: Split, key: str, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))
        super().__init__("python_stdlib", key, sorted(self._select(split)))
        if not self._files:
            raise ConfigError(
                key,
                self.name,
                f"an interpreter with its library's sources (none under {self.root}), or 'local'",
            )
        self._blocks = sorted((name for name, _ in self._files), key=_path_hash)

    @staticmethod
    def is_validation(relative_path: str) -> bool:
        """Say whether a file is held out; ``relative_path`` is in POSIX form."""
        return _path_hash(relative_path) % 20 == 0

    def _select(self, split: Split) -> Iterator[tuple[str, int]]:
        for folder, subfolders, files in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in self.EXCLUDED]
            inside = Path(folder).relative_to(self.root).as_posix()
            prefix = "" if inside == "." else f"{inside}/"
            for name in (name for name in files if name.endswith(".py")):
                relative = prefix + name
                if self.is_validation(relative) == (split == "validation"):
                    path = os.path.join(folder, name)
                    # A broken link is no file; an empty one no document.
                    if os.path.isfile(path) and (size := os.path.getsize(path)):
                        yield relative, size

    @property
    def num_blocks(self) -> int:
        """How many files there are."""
        return len(self._files)

    def documents(self, block: int) -> Iterator[str]:
        """Yield the text of one file."""
        path = self.root / self._blocks[block]
        yield path.read_bytes().decode("utf-8", errors="replace")


def _path_hash(relative_path: str) -> int:
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16)


def build_corpus(
    name: str, path: str | None, split: Split, key: str, rows: int | None = None
) -> Corpus:
    """Open a corpus by name.

    Args:
        name: One of the corpora of this module.
        path: ``dataset_path`` of the same TOML section.
        split: ``train`` or ``validation``; only ``python_stdlib`` looks at it.
        key: The TOML section, ``training`` or ``validation``, to name in errors.
        rows: Rows of the global batch, so that ``local`` can choose its block size.

    Returns:
        The corpus.

    Raises:
        ConfigError: Unknown name, nothing there, or a path where none is used.
    """
    _check_name(name, path, key)
    if name == "python_stdlib":
        return PythonStdlib(split, f"{key}.dataset")
    if name == "local":
        from torchtitan_lr.data.local_corpus import LocalCorpus

        return LocalCorpus(path or "", f"{key}.dataset_path", rows)
    from torchtitan_lr.data.hub_corpus import HubCorpus

    if path and _is_local(path):
        path = str(user_path(path, f"{key}.dataset_path"))
    return HubCorpus(name, path, key)


def check_corpus(job_config: Any) -> None:
    """Check, without the network and without reading the text, that the corpora are there.

    Args:
        job_config: The run's ``JobConfig``; sections ``training`` and ``validation`` are read.

    Raises:
        ConfigError: An unknown name, a missing or empty corpus, a pattern without a match, or a
            loader setting that this loader has no use for.
    """
    training, validation = job_config.training, job_config.validation
    sections: list[tuple[str, Any, Split]] = [("training", training, "train")]
    if validation.enable:
        sections.append(("validation", validation, "validation"))
    for key, section, split in sections:
        check_workers(section.dataloader, key)
        _check_name(section.dataset, section.dataset_path, key)
        if not section.dataset.startswith("c4"):
            corpus = build_corpus(section.dataset, section.dataset_path, split, key)
            if next(iter(corpus), None) is None:
                raise ConfigError(f"{key}.dataset", section.dataset, "a corpus with text in it")


def check_workers(dataloader: Any, key: str) -> None:
    """Refuse worker processes: the lanes live in the training process.

    Args:
        dataloader: The ``[training.dataloader]`` or ``[validation.dataloader]`` section.
        key: The TOML section it belongs to.

    Raises:
        ConfigError: Worker settings are given.
    """
    for name, idle in (
        ("num_workers", 0),
        ("persistent_workers", False),
        ("prefetch_factor", None),
    ):
        got = getattr(dataloader, name)
        if got != idle:
            want = "no value" if idle is None else str(idle).lower()
            raise ConfigError(
                f"{key}.dataloader.{name}",
                got,
                f"{want}: rows are tokenised in the training process",
            )


def _check_name(name: str, path: str | None, key: str) -> None:
    names = VALIDATION_CORPORA if key == "validation" else TRAINING_CORPORA
    if name not in names:
        raise ConfigError(f"{key}.dataset", name, "one of " + ", ".join(names))
    if name == "python_stdlib" and path:
        raise ConfigError(f"{key}.dataset_path", path, f"no path, or {key}.dataset = 'local'")
    if name == "local" and not path:
        raise ConfigError(
            f"{key}.dataset_path", path, "a file, folder or pattern of .txt, .jsonl or .parquet"
        )
    if name.startswith("c4") and path and _is_local(path):
        folder = user_path(path, f"{key}.dataset_path")
        if not folder.exists():
            raise ConfigError(f"{key}.dataset_path", path, "a local copy of c4 that exists")


def _is_local(path: str) -> bool:
    """Tell a path from the name of a dataset on the Hub."""
    return path[0] in "/.~"
