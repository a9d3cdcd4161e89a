# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Training and validation corpora by name.

``cpython``
    Source files of one version's standard library, in the package: the same text on every machine
    (``assets/cpython/README.md``).
``python_stdlib``
    The source files of the running interpreter's standard library.
``python_stdlib_docs``
    Pairs of a function's source and its summary, of the same files
    (:mod:`torchtitan_lr.data.pair_corpora`).
``local``
    The user's files: .txt, .jsonl or .parquet (:mod:`torchtitan_lr.data.local_corpus`), or pairs
    and chats in .jsonl (:mod:`torchtitan_lr.data.pairs`).
``hf``
    Any Hugging Face dataset, of the Hub or of a folder (:mod:`torchtitan_lr.data.hub_corpus`).
``c4``, ``c4_validation``
    Two cases of it: the English part of C4.

Each corpus has a held-out part that is never trained on: ``cpython`` and
``python_stdlib(_docs)`` one file in 20, ``local`` one document in two hundred
(:mod:`torchtitan_lr.data.held_out`), ``c4`` its own validation split. ``validation.dataset =
"training"`` (the default) selects the held-out part of the training corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.blocks import BlockCorpus, Corpus, Split, TextOptions, file_stamp
from torchtitan_lr.data.text_files import open_text
from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan_lr.data.mixture import MixtureSource

_OF_PYTHON = ("cpython", "python_stdlib", "python_stdlib_docs")
TRAINING_CORPORA = (*_OF_PYTHON, "local", "c4", "c4_validation", "hf")
VALIDATION_CORPORA = ("training", *_OF_PYTHON, "local", "c4_validation")

CPYTHON = Path(__file__).parent / "assets" / "cpython" / "stdlib.jsonl.zst"
"""The corpus ``cpython``: lines of ``{"path": ..., "text": ...}``."""


class PythonStdlib(BlockCorpus):
    """The .py files of the standard library, one block and one document each.

    Included: every non-empty .py file under the interpreter's stdlib path, sorted by relative
    path. Excluded: installed packages and test suites (folders named test, tests, idle_test). A
    file belongs to the validation split iff ``sha256(relative path) mod 20 == 0``.

    Blocks are in the order of these hashes. In the order of the names, one batch would be all
    asyncio and the next all character tables, and the first batches of the validation split would
    not represent the rest.

    Args:
        split: The split to read.
        key: The TOML key to name in errors.
        root: The library's folder; the running interpreter's by default.

    Raises:
        ConfigError: The interpreter has no library sources (some builds omit them).
    """

    EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

    def __init__(self, split: Split, key: str, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))
        super().__init__("python_stdlib", key, sorted(self._select(split)))
        if not self._files:
            raise ConfigError(
                key,
                self.name,
                f"an interpreter with library sources (none under {self.root}), or 'local'",
            )
        self._blocks = sorted((name for name, _ in self._files), key=_path_hash)

    @staticmethod
    def is_validation(relative_path: str) -> bool:
        """Return whether a file is held out; ``relative_path`` is in POSIX form."""
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
                    # Skip broken links and empty files.
                    if os.path.isfile(path) and (size := os.path.getsize(path)):
                        yield relative, size

    @property
    def num_blocks(self) -> int:
        """The number of files."""
        return len(self._files)

    def origin(self) -> str:
        """Return the library's folder."""
        return str(self.root)

    def stamp(self, block: int) -> str | None:
        """Return the stamp of one file."""
        return file_stamp(self.root / self._blocks[block])

    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield the text of one file."""
        path = self.root / self._blocks[block]
        try:
            yield path.read_bytes().decode("utf-8", errors="replace")
        except OSError as error:  # the interpreter was replaced during the run
            want = f"a readable file ({error.strerror or error})"
            yield DataError(self.key, str(path), want)


class CPythonSource(PythonStdlib):
    """The files of one version's standard library, split and ordered as :class:`PythonStdlib`.

    Args:
        split: The split to read.
        key: The TOML key to name in errors.
    """

    def __init__(self, split: Split, key: str) -> None:
        self.root = CPYTHON
        with open_text(CPYTHON) as file:
            records = map(json.loads, file.read().splitlines())
        self._texts: dict[str, str] = {
            record["path"]: record["text"]
            for record in records
            if self.is_validation(record["path"]) == (split == "validation")
        }
        sizes = [(name, len(text.encode())) for name, text in sorted(self._texts.items())]
        BlockCorpus.__init__(self, "cpython", key, sizes)
        self._blocks = sorted(self._texts, key=_path_hash)

    def stamp(self, block: int) -> str | None:
        """Return the stamp of the corpus and the name of one of its files."""
        return f"{file_stamp(CPYTHON)} {self._blocks[block]}"

    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield the text of one file."""
        yield self._texts[self._blocks[block]]


@cache  # a run opens the corpus three times: for the checks, for training and for validation
def _path_hash(relative_path: str) -> int:
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16)


def build_corpus(
    name: str,
    path: str | None,
    split: Split,
    key: str,
    rows: int | None = None,
    max_bad_records: int = 0,
    options: TextOptions | None = None,
) -> Corpus:
    """Open a corpus by name.

    Args:
        name: The corpus (see the module's docstring).
        path: ``dataset_path`` of the same TOML section.
        split: The split; only ``local`` has ``all``.
        key: The TOML section, ``training`` or ``validation``, to name in errors.
        rows: Rows of the global batch; ``local`` derives its block size from them.
        max_bad_records: Number of unreadable ``local`` records that may be skipped.
        options: The text of ``local`` and ``hf``.

    Raises:
        ConfigError: An unknown name, a missing corpus, or a path for a corpus that takes none.
        DataError: A small ``local`` corpus, which is read on opening, has an unreadable record.
    """
    check_name(name, path, key)
    if name == "cpython":
        return CPythonSource(split, f"{key}.dataset")
    if name == "python_stdlib":
        return PythonStdlib(split, f"{key}.dataset")
    if name == "python_stdlib_docs":
        from torchtitan_lr.data.pair_corpora import PythonStdlibDocs

        return PythonStdlibDocs(split, f"{key}.dataset")
    if name == "local":
        from torchtitan_lr.data.local_corpus import LocalCorpus
        from torchtitan_lr.data.pair_corpora import LocalPairs, holds_pairs

        files, path_key = path or "", f"{key}.dataset_path"
        if holds_pairs(files, path_key):
            return LocalPairs(files, path_key, rows, split, max_bad_records)
        column = (options or TextOptions()).column
        return LocalCorpus(files, path_key, rows, split, max_bad_records, column)
    from torchtitan_lr.data import hub_corpus

    if path and _is_local(path):
        path = str(user_path(path, f"{key}.dataset_path"))
    if name == "hf":
        return hub_corpus.open_hub(path or "", key, options or TextOptions(), split, rows)
    return hub_corpus.HubCorpus(name, path, key)


@dataclass(frozen=True)
class Source:
    """The arguments of :func:`build_corpus` for one corpus.

    Attributes:
        name: The corpus.
        path: Its files.
        split: The split to read.
        key: The TOML section to name in errors.
        max_bad_records: Number of unreadable records that may be skipped.
        options: The text of ``local`` and ``hf``.
    """

    name: str
    path: str | None
    split: Split
    key: str
    max_bad_records: int = 0
    options: TextOptions = field(default_factory=TextOptions)

    def open(self, rows: int | None = None) -> Corpus:
        """Open the corpus; ``rows`` and errors as for :func:`build_corpus`."""
        corpus = (self.name, self.path, self.split, self.key)
        return build_corpus(*corpus, rows, self.max_bad_records, self.options)


def training_source(job_config: Any) -> Source | MixtureSource:
    """Return the training corpus of a run, or the mixture of several.

    Args:
        job_config: The run's ``JobConfig``, or its saved record; section ``training`` is read.
    """
    from torchtitan_lr.data.mixture import mixture_source

    section = job_config.training
    if (mixture := mixture_source(section)) is not None:
        return mixture
    most = getattr(section, "max_bad_records", 0)
    options = text_options(section)
    return Source(section.dataset, section.dataset_path, "train", "training", most, options)


def text_options(training: Any, **changes: Any) -> TextOptions:
    """Return the options of ``[training]``, with some of them changed; old records have none."""
    values: dict[str, Any] = asdict(TextOptions())
    key_of = {"column": "text_column"}
    values = {k: getattr(training, key_of.get(k, k), value) for k, value in values.items()}
    return TextOptions(**values | changes)


def validation_source(job_config: Any) -> Source | MixtureSource:
    """Return the validation corpus of a run, by default the held-out part of the training corpus.

    Args:
        job_config: The run's ``JobConfig``, or its saved record; sections ``training`` and
            ``validation`` are read.

    Returns:
        The source. Its errors name the TOML section that sets the files.

    Raises:
        ConfigError: A path without a corpus name, or a training corpus without a held-out part.
    """
    section, training = job_config.validation, training_source(job_config)
    if section.dataset != "training":
        part: Split = "all" if section.dataset == "local" else "validation"
        named = (section.dataset, section.dataset_path, part, "validation")
        most = getattr(job_config.training, "max_bad_records", 0)
        return Source(*named, most, text_options(job_config.training))
    if section.dataset_path:
        want = "no path, or validation.dataset = 'local' with it"
        raise ConfigError("validation.dataset_path", section.dataset_path, want)
    if not isinstance(training, Source):
        return training.held_out()
    return held_out_source(training)


def held_out_source(training: Source) -> Source:
    """Return the held-out part of a training corpus.

    Raises:
        ConfigError: It has none.
    """
    name = {"c4": "c4_validation"}.get(training.name, training.name)
    if name == training.name and name == "c4_validation":
        want = "a corpus other than training.dataset = 'c4_validation' (no held-out part)"
        raise ConfigError("validation.dataset", "training", want)
    options = training.options
    if name == "hf" and options.hf_held_out:
        options = replace(options, hf_split=options.hf_held_out)
    return replace(training, name=name, split="validation", options=options)


def check_name(name: str, path: str | None, key: str) -> None:
    """Raise if a corpus is unknown, or its path is missing or not supported.

    Args:
        name: ``dataset`` of a TOML section.
        path: ``dataset_path`` of the same section.
        key: The section, ``training`` or ``validation``.

    Raises:
        ConfigError: The name or the path is invalid.
    """
    names = VALIDATION_CORPORA if key == "validation" else TRAINING_CORPORA
    if name not in names:
        raise ConfigError(f"{key}.dataset", name, "one of " + ", ".join(names))
    if name in _OF_PYTHON and path:
        raise ConfigError(f"{key}.dataset_path", path, f"no path, or {key}.dataset = 'local'")
    if name == "local" and not path:
        raise ConfigError(
            f"{key}.dataset_path", path, "a file, folder or pattern of .txt, .jsonl or .parquet"
        )
    if name == "hf" and not path:
        want = "a dataset of the Hub such as 'owner/name', or a folder of one"
        raise ConfigError(f"{key}.dataset_path", path, want)
    if is_hub(name) and path and _is_local(path):
        folder = user_path(path, f"{key}.dataset_path")
        if not folder.exists():
            raise ConfigError(f"{key}.dataset_path", path, f"a local copy of {name} that exists")


def is_hub(name: str) -> bool:
    """Return whether a corpus may be on the Hugging Face Hub, so that checks do not open it."""
    return name == "hf" or name.startswith("c4")


def _is_local(path: str) -> bool:
    """Return whether ``path`` is a local path and not the name of a Hub dataset."""
    return path[0] in "/.~"
