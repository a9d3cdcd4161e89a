# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where text comes from: files, the interpreter's library, and datasets of the Hugging Face Hub.

A source is read once, in order, in pieces of about 1 MiB. A piece is raw: the process that reads
passes it to another that decodes it, and records the position behind it, where reading can go on.
Documents are a line's ``"text"`` (.jsonl), a row's ``text`` (.parquet, Hub), a module of the
library, or the lines of a .txt file. A .jsonl file may hold pairs or chats instead
(:mod:`torchtitan_lr.data.pairs`).

A document is held out for validation if its hash is among the lowest 1/200 of all hashes. The
choice depends on the document alone, so all copies of one are in the same part. Of a few MiB that
would be nothing or a few words: a small corpus holds out the documents with the lowest hashes, up
to a tenth of the text or 16 KiB. A pair is chosen by its question, a module of the library (one in
20) by its path. A .txt file has no documents: its pieces of 4 KiB are chosen by their place.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import io
import json
import os
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.data.pairs import COMPLETION, PROMPT, is_pair, parse_pair, question_of, text_of
from torchtitan_lr.errors import ConfigError, DataError

CPYTHON, STDLIB, STDLIB_DOCS = "cpython", "python_stdlib", "python_stdlib_docs"
LIBRARIES = (CPYTHON, STDLIB, STDLIB_DOCS)

CPYTHON_FILE = Path(__file__).parent / "assets" / "cpython" / "stdlib.jsonl.zst"
"""The files of ``cpython``: lines of ``{"path": ..., "text": ...}``."""

SUFFIXES = (".txt", ".jsonl", ".parquet")
MORE = " (.txt and .jsonl also with .gz or .zst)"

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of compressed files, with pyarrow's names of the codecs."""

PIECE_BYTES = 1 << 20
"""Text of a piece: some 0.2 seconds of work for a tokenizer."""

PLACE_BYTES = 1 << 12
"""Bytes of a .txt file whose lines are held out together."""

HEAD_BYTES = 1 << 16
"""Bytes at the start of a file in which its encoding, and pairs, are looked for."""

CUE = "\n\n# Summary:"
"""What separates a function's source from the line to write about it."""

CALLER = "TORCHTITAN_LR_CALLER"
"""Environment variable: the folder where the user typed the command, for relative paths of data."""

ONE_IN = 200
"""A large corpus holds out one document in this many."""

USUAL_LIMIT = (1 << 64) // ONE_IN
"""Documents with a hash below this limit are held out, in a large corpus."""

SMALL_BYTES = 8 << 20
"""A corpus of at most this many bytes is read on opening, to find its lowest hashes."""

ENOUGH_BYTES = 16 << 10
"""Bytes of text that a small corpus holds out, but at most a tenth of it."""


@dataclass(frozen=True)
class Source:
    """What to read, and for what.

    Attributes:
        name: ``cpython``, ``python_stdlib``, ``python_stdlib_docs``, ``local`` or ``hf``.
        paths: Files, folders or patterns (``local``); the dataset's name, as ``owner/name`` or
            ``owner/name@revision``, or its folder (``hf``).
        key: The TOML key of the paths, to name in errors.
        part: ``train`` and ``held_out`` put all documents there; ``both`` chooses by hash.
        column: Name of the text in a record.
        config: The dataset's configuration, such as ``en``; None for its only one.
        split: The dataset's split.
        streaming: Whether to stream the dataset up to ``tokens``, and not to download it first.
        tokens: Where to stop, counted in tokens of ``part`` (of ``both``: to train on).
    """

    name: str
    paths: tuple[str, ...] = ()
    key: str = "training.dataset_path"
    part: Literal["train", "held_out", "both"] = "both"
    column: str = "text"
    config: str | None = None
    split: str = "train"
    streaming: bool = True
    tokens: int | None = None

    def __str__(self) -> str:
        """Return what the user named."""
        return ", ".join(self.paths) or self.name


class Piece(NamedTuple):
    """Some text as it was read.

    Attributes:
        file: Its file, for errors.
        form: ``jsonl`` and ``txt`` are whole lines in bytes; ``documents`` and ``modules`` are
            lists of texts.
        data: The text.
        position: Where to read on behind it (JSON).
        start: Bytes of the file before it.
        line: Number of its first line.
        held_out: The part of all its documents; None to choose by hash.
        read: Bytes of the source's files that have been read, as they are on disk.
    """

    file: str
    form: Literal["jsonl", "txt", "documents", "modules"]
    data: bytes | list[str]
    position: Any
    start: int = 0
    line: int = 1
    held_out: bool | None = None
    read: int = 0


class Bad(NamedTuple):
    """A record that cannot be read: its place, and what was expected there."""

    where: str
    want: str


class Reader:
    """Reads a source.

    Args:
        source: The source.

    Attributes:
        source: As given.
        pairs: Whether its documents are canonical records of pairs.
        commit: Of a dataset of the Hub, the commit that is read; found when it is opened.

    Raises:
        ConfigError: There is no such source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.files: list[Path] = []
        self.commit: str | None = None
        if source.name == "local":
            self.files = find_files(source.paths, source.key)
            self._root = Path(os.path.commonpath([file.parent for file in self.files]))
        elif source.name == CPYTHON:
            self.files = [CPYTHON_FILE]
        elif source.name in LIBRARIES:
            self._root = Path(sysconfig.get_path("stdlib"))
            self.files = library_files(self._root)
        elif (place := data_path(source.paths[0], source.key)).exists():
            files = place.rglob("*") if place.is_dir() else [place]
            self.files = sorted(file for file in files if file.is_file())
        self.pairs = source.name == STDLIB_DOCS or self._holds_pairs()

    def stamp(self) -> dict[str, Any]:
        """Return what identifies the text without reading it: place, size and time of files."""
        stats = [(os.path.abspath(file), file.stat()) for file in self.files]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        named = asdict(replace(self.source, key="", paths=() if files else self.source.paths))
        return named | {"files": files}

    @cached_property
    def size(self) -> int | None:
        """Bytes of the files on disk; None for a dataset, which may read some of them."""
        if self.source.name == "hf":
            return None
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def limit(self) -> int:
        """The hash below which a document is held out; finding that of a small corpus reads it."""
        local = self.source.name == "local" and self.source.part == "both"
        if not local or (self.size or 0) > SMALL_BYTES:
            return USUAL_LIMIT
        sizes: dict[int, int] = {}
        for piece in self.pieces():
            if piece.form == "txt":
                found = [(document_hash(name), len(text)) for name, text in self._places(piece)]
            else:  # no limit is known yet, and none is needed: a part is given
                read = self.documents(piece._replace(held_out=False))
                texts = [each[0] for each in read if not isinstance(each, Bad)]
                found = [(self._hash(text), len(text.encode())) for text in texts]
            for key, size in found:
                sizes[key] = sizes.get(key, 0) + size
        if len(sizes) < 2:
            return 0
        wanted, held = min(ENOUGH_BYTES, sum(sizes.values()) // 10), 0
        *candidates, last = sorted(sizes)
        for key in candidates:
            if held and held >= wanted and key >= USUAL_LIMIT:
                return key
            held += sizes[key]
        return last  # the document with the highest hash is always left for training

    def pieces(self, position: Any = None) -> Iterator[Piece]:
        """Read the source.

        Args:
            position: Where to read on, from a piece; None for the beginning.

        Raises:
            DataError: A file is unreadable, or breaks off in the middle.
            ConfigError: A dataset cannot be opened.
        """
        if self.source.name == "hf":
            yield from self._dataset(position)
        elif self.source.name in LIBRARIES:
            yield from self._library(position or 0)
        else:
            index, rest = position or (0, None)
            before = sum(file.stat().st_size for file in self.files[:index])
            for number, file in enumerate(self.files[index:], index):
                read = self._parquet if kind_of(file) == ".parquet" else self._lines
                for piece in read(number, file, rest):
                    yield piece._replace(read=before + piece.read)
                rest = None
                before += file.stat().st_size

    def documents(self, piece: Piece) -> Iterator[tuple[str, bool] | Bad]:
        """Decode a piece of :meth:`pieces`.

        Yields:
            A document (of pairs its canonical record) and whether it is held out; or a record that
            cannot be read. Empty documents are left out.
        """
        if piece.form == "txt":
            places = [(self._is_held_out(name, piece), text) for name, text in self._places(piece)]
            for held_out, run in groupby(places, lambda place: place[0]):
                text = b"".join(lines for _, lines in run)
                yield text.decode("utf-8", errors="replace"), held_out
        elif piece.form == "jsonl":
            assert isinstance(piece.data, bytes)
            for number, line in enumerate(piece.data.split(b"\n"), piece.line):
                try:
                    document = self._parse(line) if line.strip() else ""
                except ValueError as error:
                    yield Bad(f"{piece.file}:{number}", str(error))
                    continue
                if document:
                    yield document, self._is_held_out(document, piece)
        else:
            texts = (str(text) for text in piece.data)
            if self.source.name == STDLIB_DOCS:
                texts = (pair for text in texts for pair in documented_functions(text))
            yield from ((text, self._is_held_out(text, piece)) for text in texts if text)

    def texts(self, held_out: bool | None = None) -> Iterator[str]:
        """Yield the documents (of pairs the canonical records) of a part; None for both.

        Raises:
            DataError: A file or a record is unreadable.
        """
        for piece in self.pieces():
            for found in self.documents(piece):
                if isinstance(found, Bad):
                    raise DataError(self.source.key, found.where, found.want)
                if held_out in (None, found[1]):
                    yield found[0]

    def _is_held_out(self, document: str, piece: Piece) -> bool:
        if piece.held_out is not None:
            return piece.held_out
        if self.source.part != "both":
            return self.source.part == "held_out"
        return self._hash(document) < self.limit

    def _hash(self, document: str) -> int:
        return document_hash(question_of(document) if self.pairs else document)

    def _parse(self, line: bytes) -> str:
        """Return the document of a .jsonl line, "" for none.

        Raises:
            ValueError: The line is not valid; the message is what was expected.
        """
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if self.pairs:
            return parse_pair(record)
        text = record.get(self.source.column) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'a JSON object with a string "{self.source.column}"')
        # JSON can encode a lone surrogate, which tokenizers reject.
        return text.encode("utf-8", errors="replace").decode("utf-8")

    def _places(self, piece: Piece) -> list[tuple[str, bytes]]:
        """Return the lines of a .txt file that start in the same bytes, and a name for each."""
        assert isinstance(piece.data, bytes)
        name = Path(piece.file).relative_to(self._root).as_posix()
        found: dict[str, list[bytes]] = {}
        start = piece.start
        for line in io.BytesIO(piece.data):
            found.setdefault(f"{name}:{start // PLACE_BYTES}", []).append(line)
            start += len(line)
        return [(name, b"".join(lines)) for name, lines in found.items()]

    def _holds_pairs(self) -> bool:
        """Return whether the first JSON object of the first .jsonl file is a pair or a chat."""
        files = [file for file in self.files if kind_of(file) == ".jsonl"]
        if not files or self.source.name != "local":
            return False
        head = b""
        with suppress(OSError), files[0].open("rb") as raw:  # reading it later reports the error
            head = _decompressed(raw, files[0]).read(HEAD_BYTES)
        for line in head.split(b"\n"):
            with suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line), dict):
                    break
        else:
            return False
        if not is_pair(record):
            return False
        if other := [file for file in self.files if file not in files]:
            raise ConfigError(self.source.key, str(other[0]), "only .jsonl files of pairs")
        return True

    def _lines(self, number: int, path: Path, rest: Any) -> Iterator[Piece]:
        """Read a .txt or .jsonl file from ``rest``: the bytes and the lines before."""
        start, line = rest or (0, 1)
        form: Any = kind_of(path)[1:]
        try:
            for data, read in _whole_lines(path, start):
                head = data[:HEAD_BYTES].decode("utf-8", errors="replace")
                # A few bad bytes are no other encoding.
                if not start and ("\0" in head or head.count("\ufffd") * 10 > len(head)):
                    want = "text in UTF-8; this is UTF-16, in another encoding or binary"
                    raise DataError(self.source.key, str(path), want)
                after = (start + len(data), line + data.count(b"\n"))
                yield Piece(str(path), form, data, (number, after), start, line, read=read)
                start, line = after
        except OSError as error:
            want = f"a readable file that does not break off ({error.strerror or error})"
            raise DataError(self.source.key, str(path), want) from error

    def _parquet(self, number: int, path: Path, rest: Any) -> Iterator[Piece]:
        """Read a .parquet file behind its first ``rest`` rows."""
        # Imported late: text files do not need pyarrow.
        import pyarrow as pa
        import pyarrow.parquet as pq

        done, column = rest or 0, self.source.column
        try:
            with pq.ParquetFile(path) as file:
                kind = file.schema_arrow.field(column).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise DataError(self.source.key, str(path), f"strings in column '{column}'")
                batches = file.iter_batches(256, columns=[column], use_threads=False)
                texts = (text for batch in batches for text in batch.column(0).to_pylist())
                for some in _grouped(text or "" for text in islice(texts, done, None)):
                    done += len(some)
                    read = path.stat().st_size * done // file.metadata.num_rows
                    yield Piece(str(path), "documents", some, (number, done), read=read)
        # A damaged file can raise any of these; ValueError means text that is not UTF-8.
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            want = f"intact parquet with a column '{column}' ({type(error).__name__})"
            raise DataError(self.source.key, str(path), want) from error

    def _library(self, position: int) -> Iterator[Piece]:
        """Read the library's files from the one at ``position``.

        Those to train on come first, both parts in the order of their hashes. In the order of the
        names, one batch would be all asyncio and the next all character tables.
        """
        found: list[tuple[int, str | Path]] = []
        if self.source.name == CPYTHON:
            for data, _ in _whole_lines(CPYTHON_FILE, 0):
                records = map(json.loads, data.splitlines())
                found += [(_path_hash(record["path"]), record["text"]) for record in records]
        else:
            names = (path.relative_to(self._root).as_posix() for path in self.files)
            found += zip(map(_path_hash, names), self.files, strict=True)
        found.sort(key=lambda file: (file[0] % 20 == 0, file[0]))

        def read(file: str | Path) -> str:
            if isinstance(file, str):
                return file
            try:
                return file.read_bytes().decode("utf-8", errors="replace")
            except OSError as error:
                want = f"a readable file ({error.strerror or error})"
                raise DataError(self.source.key, str(file), want) from error

        for held_out, group in groupby(found[position:], lambda file: file[0] % 20 == 0):
            for some in _grouped(read(file) for _, file in group):
                position += len(some)
                done = (self.size or 0) * position // len(found)
                yield Piece(STDLIB, "modules", some, position, held_out=held_out, read=done)

    def _dataset(self, position: Any) -> Iterator[Piece]:
        """Read a dataset from the state at ``position``."""
        rows, column = load_dataset(self), self.source.column
        if position is not None:
            rows.load_state_dict(position)
        try:
            for some in _grouped(row.get(column) or "" for row in rows):
                if bad := next((text for text in some if not isinstance(text, str)), None):
                    raise ConfigError("training.text_column", column, f"text, not {type(bad)}")
                yield Piece(str(self.source), "documents", some, rows.state_dict())
        except ConfigError:
            raise
        except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
            why = f"{type(error).__name__}: {str(error)[:200]}"
            want = f"a dataset that can be read on ({why})"
            raise DataError(self.source.key, str(self.source), want) from error


def texts(source: Source, held_out: bool | None = None) -> Iterator[str]:
    """Yield every document as plain text, for what has no use for tokens or labels.

    Arguments and errors are those of :meth:`Reader.texts`.
    """
    reader = Reader(source)
    for text in reader.texts(held_out):
        yield text_of(text) if reader.pairs else text


def document_hash(document: str) -> int:
    """Return a 64-bit hash of a document's text."""
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def data_path(path: str, key: str) -> Path:
    """Return a path of data; relative to the folder where the user typed the command.

    Raises:
        ConfigError: As for :func:`user_path`.
    """
    return Path(os.environ.get(CALLER, "")) / user_path(path, key)


def kind_of(path: Path) -> str:
    """Return a file's suffix without that of its compression: .jsonl of ``a.jsonl.zst``."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def find_files(paths: tuple[str, ...], key: str) -> list[Path]:
    """Return the non-empty files with a supported suffix, sorted by path.

    Args:
        paths: Files, folders or glob patterns.
        key: The TOML key to name in errors.

    Raises:
        ConfigError: There is none.
    """
    found: list[Path] = []
    for path in paths:
        target = data_path(path, key)
        if target.is_dir():
            found += [file for file in target.rglob("*") if file.is_file()]
        elif target.is_file():
            found.append(target)
        elif names := glob.glob(str(target), recursive=True):
            found += map(Path, names)
        else:
            raise ConfigError(key, path, "an existing file or folder, or a pattern that matches")
    known = [
        file
        for file in found
        if kind_of(file) in SUFFIXES
        and file.is_file()
        and (kind_of(file) != ".parquet" or file.suffix not in COMPRESSED)
    ]
    if not known:
        raise ConfigError(key, ", ".join(paths), "files that end in " + ", ".join(SUFFIXES) + MORE)
    filled = {Path(os.path.abspath(file)) for file in known if file.stat().st_size}
    if not filled:
        raise ConfigError(key, ", ".join(paths), "files that are not empty")
    return sorted(filled, key=lambda file: file.as_posix())


EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders of the library that are not read: installed packages and test suites."""


def library_files(root: Path) -> list[Path]:
    """Return the non-empty .py files of a library.

    Raises:
        ConfigError: The interpreter has no library sources (some builds omit them).
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        # Skip broken links and empty files.
        found += [path for path in paths if path.is_file() and path.stat().st_size]
    if not found:
        want = f"an interpreter with library sources (none under {root}), or 'cpython'"
        raise ConfigError("training.dataset", STDLIB, want)
    return found


def _path_hash(relative_path: str) -> int:
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16)


def _whole_lines(path: Path, begin: int) -> Iterator[tuple[bytes, int]]:
    """Yield the text behind ``begin`` bytes, cut at ends of lines, and the bytes read on disk."""
    with path.open("rb") as raw, _decompressed(raw, path) as file:
        if file is raw:
            raw.seek(begin)
        left = 0 if file is raw else begin
        while left:
            left -= len(file.read(min(left, PIECE_BYTES)))
        rest, place = b"", begin
        # Up to multiples of the size: a resumed reading cuts where an uninterrupted one does.
        while data := file.read(PIECE_BYTES - place % PIECE_BYTES):
            place += len(data)
            cut = data.rfind(b"\n") + 1  # a carriage return ends no line
            if cut:
                yield rest + data[:cut], raw.tell()
                rest = b""
            rest += data[cut:]
        if rest:
            yield rest, raw.tell()


def _decompressed(raw: IO[bytes], path: Path) -> Any:
    """Return a file's text for reading bytes; reading raises OSError where a file is cut."""
    if path.suffix not in COMPRESSED:
        return raw
    import pyarrow as pa  # imported late: plain text does not need it

    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), COMPRESSED[path.suffix])


def _grouped(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yield documents in lists of about :data:`PIECE_BYTES`."""
    some: list[str] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document)
        if size >= PIECE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def load_dataset(reader: Reader) -> Any:
    """Open a dataset as an ``IterableDataset``; a folder that exists needs no network.

    Sets the reader's commit, and reads this one if it is known: a name such as ``main`` moves.

    Raises:
        ConfigError: It cannot be opened, or has no such column.
    """
    import datasets  # imported late: it takes a second
    import huggingface_hub as hub

    source, (given,) = reader.source, reader.source.paths
    place = data_path(given, source.key)
    options: dict[str, Any] = {"split": source.split, "streaming": source.streaming}
    try:
        if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(place))
            found = found[source.split] if isinstance(found, dict) else found
        elif place.is_dir():
            found = datasets.load_dataset(str(place), name=source.config, **options)
        else:
            path, _, revision = given.partition("@")
            # One request first: without a network `datasets` tries again for a minute per file.
            if not reader.commit and not hub.constants.HF_HUB_OFFLINE:
                about = hub.HfApi().dataset_info(path, revision=revision or None, timeout=10)
                reader.commit = about.sha
            options |= {"name": source.config, "revision": reader.commit or revision or None}
            found = datasets.load_dataset(path, **options)
        columns = found.column_names
    except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
        why = " ".join(str(error).split())[:200]
        want = (
            f"a dataset that opens ({type(error).__name__}: {why}); "
            "without a network name a local copy here, or files with --training.dataset=local"
        )
        raise ConfigError(source.key, given, want) from error
    if columns is not None and source.column not in columns:
        want = f"one of the columns of {given!r}: {', '.join(columns)}"
        raise ConfigError("training.text_column", source.column, want)
    return found.to_iterable_dataset() if isinstance(found, datasets.Dataset) else found


def documented_functions(source: str) -> Iterator[str]:
    """Yield the pairs of a module: a function's source, and the first line of its docstring.

    The prompt has neither docstring nor decorators. Functions without other statements are left
    out.

    Args:
        source: The module's text; one that this interpreter cannot parse has no pairs.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = re.split(r"\r\n|\r|\n", source)  # as Python counts them
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    for node in sorted(functions, key=lambda node: node.lineno):
        summary = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
        if not summary or len(node.body) < 2:
            continue
        docstring, following = node.body[:2]
        first, last = docstring.lineno, docstring.end_lineno or docstring.lineno
        if lines[first - 1][: docstring.col_offset].strip() or following.lineno <= last:
            continue  # shares a line with other code
        code = lines[node.lineno - 1 : first - 1] + lines[last : node.end_lineno]
        prompt = textwrap.dedent("\n".join(code)) + CUE
        yield parse_pair({PROMPT: prompt, COMPLETION: f" {summary}"})
