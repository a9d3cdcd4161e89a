# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where text comes from: files, the interpreter's library, and datasets of the Hugging Face Hub.

A source is read once, in order, in raw pieces of about 1 MiB. Documents are a line's ``"text"``
(.jsonl), a row's ``text`` (.parquet, Hub), a module of the library, or the lines of a .txt file. A
.jsonl file may hold pairs or chats instead (:mod:`torchtitan_lr.data.pairs`).

A document is held out for validation by its hash: all copies of one are in the same part. A pair
is chosen by its question, a module of the library (one in 20) by its path. A .txt file has no
documents: its pieces of 4 KiB are chosen by their place.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import lzma
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, count, groupby
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from torchtitan_lr.config.files import sample_of
from torchtitan_lr.config.paths import leads_out, user_path
from torchtitan_lr.data.pairs import MESSAGES, PROMPT, parse_pair, question_of
from torchtitan_lr.errors import ConfigError, DataError, require

CPYTHON, STDLIB, STDLIB_DOCS = "cpython", "python_stdlib", "python_stdlib_docs"
LIBRARIES = (CPYTHON, STDLIB, STDLIB_DOCS)

_ASSETS = Path(__file__).parent / "assets" / "cpython"
SHIPPED = {CPYTHON: _ASSETS / "stdlib.jsonl.zst", STDLIB_DOCS: _ASSETS / "docs.jsonl.zst"}
"""A module's path and text per line; the text of `STDLIB_DOCS` has one canonical pair per line."""

# Folders of the library that are not read: installed packages and test suites.
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
ENDINGS = (*(kind + end for end in ("", *CODECS) for kind in (".txt", ".jsonl")), ".parquet")

PIECE_BYTES = 1 << 20  # of text: some 0.2 seconds of work for a tokenizer
PLACE_BYTES = 1 << 12  # lines of a .txt file within these bytes are held out together
HEAD_BYTES = 1 << 16  # of a file, in which its encoding is looked for
ROWS = 64  # of a .parquet file are read at once
# Bytes of the longest line of a .jsonl file, or characters of a column's text. A tokenizer takes
# some 130 bytes of memory per byte of one document: 2 GB for these 16 MiB.
LONGEST = 1 << 24

BOM = b"\xef\xbb\xbf"  # some editors write it before a text in UTF-8

ONE_IN = 200
USUAL_LIMIT = (1 << 64) // ONE_IN  # a large corpus holds out the documents with lower hashes
SMALL_BYTES = 8 << 20  # a corpus up to this size is read on opening, to find its lowest hashes
ENOUGH_BYTES = 16 << 10  # a small corpus holds out this much text, but at most a tenth


@dataclass(frozen=True)
class Source:
    """What to read, and for what.

    ``paths`` are files, folders or patterns (``local``), or the dataset's name (``owner/name`` or
    ``owner/name@revision``) or folder (``hf``).
    """

    name: str  # one of `LIBRARIES`, "local" or "hf"
    paths: tuple[str, ...] = ()
    key: str = "training.dataset_path"  # of the paths, to name in errors
    part: Literal["train", "held_out", "both"] = "both"  # of all documents; "both": by their hashes
    column: str = "text"
    config: str | None = None  # such as "en"; None for a dataset's only one
    split: str = "train"
    streaming: bool = True  # and not to download the dataset first
    tokens: int | None = None  # where to stop, counted in `part` (of "both": to train on)

    def __str__(self) -> str:
        """Return what the user named."""
        return ", ".join(self.paths) or self.name


class Piece(NamedTuple):
    """Some text as it was read."""

    file: str  # for errors
    data: bytes | list[str]  # whole lines, or texts
    size: int  # its bytes or characters
    start: int | None = None  # bytes of a .txt file before it; None of others, with documents
    line: int = 1  # the number of its first line or row
    held_out: bool | None = None  # the part of all its documents; None to choose by hash


Bad = tuple[str, str]
"""The place of a record that cannot be read, and what was expected there."""


class Reader:
    """Reads a source; a ConfigError says that there is none."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.files: list[Path] = []  # that it is read from, if they are on this machine
        self.commit: str | None = None  # of a dataset of the Hub: see `find_commit`
        self.pairs = source.name == STDLIB_DOCS  # or a .jsonl file of them
        if source.name == "local":
            self.files = find_files(source.paths, source.key)
            self._root = Path(os.path.commonpath([file.parent for file in self.files]))
            self.pairs = self._holds_pairs()
        elif source.name in SHIPPED:
            self.files = [SHIPPED[source.name]]
        elif source.name == STDLIB:
            self._root = Path(sysconfig.get_path("stdlib"))
            self.files = library_files(self._root)
        elif (place := data_path(source.paths[0], source.key)).is_dir():
            self.files = sorted(file for file in place.rglob("*") if file.is_file())
            _refuse_links(self.files, place, source.key)

    def _holds_pairs(self) -> bool:
        """Return whether the first JSON object of the first .jsonl file is a pair or a chat."""
        files, first = [file for file in self.files if kind_of(file) == ".jsonl"], None
        # There may be none, and reading it later reports what is wrong.
        with suppress(IndexError, OSError, EOFError, lzma.LZMAError), files[0].open("rb") as raw:
            lines = io.BufferedReader(_decompressed(raw, files[0]))
            while not isinstance(first, dict) and (line := lines.readline(LONGEST + 1)):
                first = _from_json(line)
        if not isinstance(first, dict) or "text" in first or not first.keys() & {PROMPT, MESSAGES}:
            return False
        if other := [file for file in self.files if file not in files]:
            raise ConfigError(self.source.key, str(other[0]), "only .jsonl files of pairs")
        return True

    @cached_property
    def stamp(self) -> dict[str, Any]:
        """What identifies the text: places and contents of files; the times too of large ones."""
        try:
            samples, is_whole = sample_of(self.files)
            times = [0 if is_whole else file.stat().st_mtime_ns for file in self.files]
        except OSError as error:
            want = f"a file that can be read ({error.strerror})"
            raise DataError(self.source.key, str(error.filename or self.source), want) from error
        files = list(zip(map(os.path.abspath, self.files), samples, times, strict=True))
        named = asdict(replace(self.source, key="", paths=() if files else self.source.paths))
        return named | {"files": files}

    @cached_property
    def limit(self) -> int:
        """The hash below which a document is held out; for a small corpus this reads all of it."""
        local = self.source.name == "local" and self.source.part == "both"
        if not local or sum(file.stat().st_size for file in self.files) > SMALL_BYTES:
            return USUAL_LIMIT
        sizes: Counter[int] = Counter()
        for piece in self.pieces():
            for hashed, text in self._records(piece, []):
                sizes[document_hash(hashed)] += len(text.encode())
        if len(sizes) < 2:
            return 0
        wanted, held = min(ENOUGH_BYTES, sizes.total() // 10), 0
        *candidates, last = sorted(sizes)
        for key in candidates:
            if held and held >= wanted and key >= USUAL_LIMIT:
                return key
            held += sizes[key]
        return last  # the document with the highest hash is always left for training

    def pieces(self) -> Iterator[Piece]:
        """Read the source; a DataError says what cannot be opened, or breaks off in the middle."""
        kind = self.source.name
        for file in self.files if kind == "local" else [Path(str(self.source))]:
            of_file = self._rows if file.suffix == ".parquet" else self._lines
            read = {"local": of_file, "hf": self._dataset}.get(kind, self._modules)
            with self._in_one_line(file):
                yield from read(file)

    @contextmanager
    def _in_one_line(self, file: Path) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:  # pyarrow, datasets and its HTTP layer raise any type
            why = f"{type(error).__name__}: {str(error)[:200]}"
            want = f"a source that opens and does not break off in the middle ({why})"
            if self.source.name == "hf":
                want += "; without a network name a folder, or files of training.dataset=local"
            raise DataError(self.source.key, str(file), want) from error

    def find_commit(self) -> None:
        """Find the commit of a dataset of the Hub, if it is not known; errors as for `pieces`."""
        source = self.source
        if source.name != "hf" or self.commit or data_path(source.paths[0], source.key).is_dir():
            return
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            return
        name, _, revision = source.paths[0].partition("@")
        # One request first: without a network `datasets` tries for a minute per file.
        with self._in_one_line(Path(str(source))):
            about = HfApi().dataset_info(name, revision=revision or None, timeout=10)
        self.commit = about.sha

    def documents(self, piece: Piece) -> tuple[tuple[list[str], list[str]], list[Bad]]:
        """Decode a piece: documents to train on and held out, and records that cannot be read.

        Empty documents are left out. Pairs are canonical records.
        """
        known = {"train": False, "held_out": True}.get(self.source.part, piece.held_out)
        parts, bad = (list[str](), list[str]()), list[Bad]()

        def part(found: tuple[str, str]) -> bool:
            return document_hash(found[0]) < self.limit if known is None else known

        for held_out, run in groupby(self._records(piece, bad), part):
            texts = [text for _, text in run]
            # The lines of .txt that follow each other are one document.
            parts[held_out].extend(texts if piece.start is None else ["".join(texts)])
        return parts, bad

    def texts(self, held_out: bool = False) -> Iterator[str]:
        """Yield the documents (of pairs canonical records) of a part; errors as for `pieces`."""
        for piece in self.pieces():
            parts, bad = self.documents(piece)
            if bad:
                raise DataError(self.source.key, *bad[0])
            yield from parts[held_out]

    def _records(self, piece: Piece, bad: list[Bad]) -> Iterator[tuple[str, str]]:
        """Yield what is hashed to choose the part of a text, and the text."""
        if piece.start is not None:
            yield from self._places(piece, bad)
            return
        lines: list[Any] = piece.data if isinstance(piece.data, list) else piece.data.split(b"\n")
        for number, line in enumerate(lines, piece.line):
            try:
                for document in self._of_line(line):
                    # JSON can encode half of a surrogate pair, which tokenizers reject: now '?'.
                    clean = document.encode("utf-8", errors="replace").decode("utf-8")
                    yield question_of(clean) if self.pairs else clean, clean
            except ValueError as error:
                bad.append((f"{piece.file}:{number}", str(error)))

    def _places(self, piece: Piece, bad: list[Bad]) -> Iterator[tuple[str, str]]:
        """Yield the lines of .txt that start in the same bytes, with the name of their place."""
        assert isinstance(piece.data, bytes) and piece.start is not None
        name = Path(piece.file).relative_to(self._root).as_posix()
        lines = list(io.BytesIO(piece.data)) if b"\n" in piece.data else _split(piece.data)
        starts = accumulate(map(len, lines), initial=piece.start)
        numbered = zip(starts, count(piece.line), lines, strict=False)
        for place, run in groupby(numbered, lambda each: each[0] // PLACE_BYTES):
            texts = []
            for start, number, line in run:
                try:
                    texts.append(_decoded(line if start else line.removeprefix(BOM)))
                except ValueError as error:
                    bad.append((f"{piece.file}:{number}", str(error)))
            if text := "".join(texts):
                yield f"{name}:{place}", text

    def _of_line(self, line: bytes | str) -> list[str]:
        """Return the documents of a .jsonl line, or of a row; a ValueError says what is wrong."""
        if len(line) > LONGEST:
            raise ValueError(f"a text of at most {LONGEST:,} bytes")
        if isinstance(line, str):
            return [part for part in (line.split("\n") if self.pairs else [line]) if part]
        if not line.strip():
            return []
        record, column = _from_json(_decoded(line.removeprefix(BOM))), self.source.column
        if self.pairs:
            return [parse_pair(record)]
        text = record.get(column) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'a JSON object with a string "{column}"')
        return [text] if text else []

    def _lines(self, path: Path) -> Iterator[Piece]:
        """Read a .txt or .jsonl file, in pieces that end with a line."""
        is_plain = kind_of(path) == ".txt"
        with path.open("rb") as raw, _decompressed(raw, path) as file:
            held = bytearray()  # of a line that goes on
            start = 0 if is_plain else None  # of the piece, as is its line
            line, place = 1, 0  # bytes that were read
            # Up to multiples of the size, however few bytes a codec gives at once.
            while new := file.read(PIECE_BYTES - place % PIECE_BYTES):
                head = new[:HEAD_BYTES].decode("utf-8", errors="replace") if not place else ""
                if "\0" in head or head.count("\ufffd") * 10 > len(head):  # a few are bad lines
                    want = "text in UTF-8; this is UTF-16, binary or another (iconv converts it)"
                    raise DataError(self.source.key, str(path), want)
                place += len(new)
                cut = new.rfind(b"\n") + 1  # a carriage return ends no line
                if is_plain and not cut and len(held) + len(new) >= PIECE_BYTES:
                    cut = _cut_in_line(new)
                # The rest of a line that is too long is not kept.
                held += new[:cut] if cut else new[: max(0, LONGEST + 1 - len(held))]
                if cut:
                    yield Piece(str(path), bytes(held), len(held), start, line)
                    start = place - len(new) + cut if is_plain else None
                    line += held.count(b"\n")
                    held = bytearray(new[cut:])
            if held:
                yield Piece(str(path), bytes(held), len(held), start, line)

    def _rows(self, path: Path) -> Iterator[Piece]:
        # Imported late: text files do not need pyarrow.
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            self._require_column(file.schema_arrow.names)
            batches = file.iter_batches(ROWS, columns=[self.source.column])
            texts = chain.from_iterable(batch[0].to_pylist() for batch in batches)
            yield from _grouped(path, (text or "" for text in texts))

    def _require_column(self, known: list[str]) -> None:
        column, want = self.source.column, f"one of the columns of {self.source}: "
        require(column in known, "training.text_column", column, want + ", ".join(known))

    def _modules(self, path: Path) -> Iterator[Piece]:
        """Read the library's files: those to train on, then those held out, by their hashes.

        In the order of the names, one batch would be all asyncio and the next all character tables.
        """
        if self.source.name in SHIPPED:
            with self.files[0].open("rb") as raw, _decompressed(raw, self.files[0]) as file:
                texts = {r["path"]: r["text"] for r in map(json.loads, file.read().splitlines())}
        else:
            texts = {
                file.relative_to(self._root).as_posix(): file.read_bytes().decode(errors="replace")
                for file in self.files
            }
        hashes = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) for name in texts}
        for held_out in (False, True):
            names = sorted(texts, key=hashes.__getitem__)
            own = (texts[name] for name in names if (hashes[name] % 20 == 0) == held_out)
            for piece in _grouped(path, own):
                yield piece._replace(held_out=held_out)

    def _dataset(self, path: Path) -> Iterator[Piece]:
        """Read a dataset at its commit, as a name such as ``main`` moves; a folder has none."""
        import datasets  # imported late: it takes a second

        source, (given,) = self.source, self.source.paths
        place = data_path(given, source.key)
        if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows: Any = datasets.load_from_disk(str(place))
            rows = rows[source.split] if isinstance(rows, dict) else rows
        else:
            name, _, revision = (str(place), "", "") if place.is_dir() else given.partition("@")
            self.find_commit()
            options = {"split": source.split, "streaming": source.streaming}
            options["revision"] = self.commit or revision or None
            rows = datasets.load_dataset(name, source.config, **options)
        self._require_column(rows.column_names or [source.column])
        texts = (row.get(source.column) or "" for row in rows)
        yield from _grouped(path, texts)


def document_hash(document: str) -> int:
    """Return a 64-bit hash of a document's text."""
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def data_path(path: str, key: str) -> Path:
    """Return a path of data, relative to the folder where the user typed the command."""
    return Path(os.environ.get("TORCHTITAN_LR_CALLER", "")) / user_path(path, key)


def kind_of(path: Path) -> str:
    """Return a file's suffix without that of its compression: .jsonl of ``a.jsonl.zst``."""
    return Path(path.stem).suffix if path.suffix in CODECS else path.suffix


def find_files(paths: tuple[str, ...], key: str) -> list[Path]:
    """Return the files of paths, folders and patterns that hold text, sorted by path."""
    found: dict[Path, Path] = {}  # by their places without links: a loop of folders ends
    for path in paths:
        target, folder = data_path(path, key), None
        if target.is_file():
            files = [target]
        elif target.is_dir():
            files, folder = list(target.rglob("[!.]*")), target
            files = [file for file in files if "/." not in f"/{file.relative_to(target)}"]
        else:
            files = [Path(name) for name in sorted(glob.glob(str(target), recursive=True), key=len)]
            folder = Path(os.path.dirname(glob.escape(str(target)).partition("[")[0]))
        require(files, key, path, "an existing file or folder, or a pattern that matches")
        known = [file for file in files if file.name.endswith(ENDINGS) and file.is_file()]
        if folder is not None:
            _refuse_links(known, folder, key)
        for file in known:
            found.setdefault(file.parent.resolve() / file.name, Path(os.path.abspath(file)))
    want = "files that are not empty" if found else "files that end in " + ", ".join(ENDINGS)
    filled = [file for file in found.values() if file.stat().st_size]
    require(filled, key, ", ".join(paths), want)
    return sorted(filled, key=Path.as_posix)


def _refuse_links(files: list[Path], folder: Path, key: str) -> None:
    """Refuse links out of a folder: who sent it could have named any file of this machine."""
    for file in files:
        want = f"files of {folder}; this one is a link to {file.resolve()}: name that to read it"
        require(not leads_out(file, folder), key, str(file), want)


def library_files(root: Path) -> list[Path]:
    """Return the .py files of a library but empty ones."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        files = (Path(folder, name) for name in names if name.endswith(".py"))
        # No broken link.
        found += [file for file in files if file.is_file() and file.stat().st_size]
    return found


def _from_json(line: str | bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _decoded(text: bytes) -> str:
    """Return text in UTF-8; a ValueError says what else it has."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        want = f"text in UTF-8, not the byte 0x{text[error.start]:02x} at {error.start}"
        raise ValueError(f"{want} (`iconv -f LATIN1 -t UTF-8` converts ISO-8859-1)") from error


def _cut_in_line(text: bytes) -> int:
    """Return where to cut a long line of .txt: before its last space, or between characters."""
    cut = text.rfind(b" ")
    if cut > 0:
        return cut
    for place in range(len(text) - 1, max(0, len(text) - 4), -1):
        if text[place] & 0xC0 != 0x80:  # the first byte of a character
            return place
    return len(text)


def _split(line: bytes) -> list[bytes]:
    """Cut a line that does not end into parts of at most :data:`PLACE_BYTES`."""
    parts, start = list[bytes](), 0
    while len(line) - start > PLACE_BYTES:
        parts.append(line[start : start + _cut_in_line(line[start : start + PLACE_BYTES])])
        start += len(parts[-1])
    return [*parts, line[start:]]


def _decompressed(raw: IO[bytes], path: Path) -> Any:
    """Return a file's text for reading bytes; reading raises OSError where a file is cut."""
    codec = CODECS.get(path.suffix)
    if codec is None:
        return raw
    if codec == "xz":  # which pyarrow does not read
        return lzma.open(raw)
    import pyarrow as pa  # imported late: plain text does not need it

    return pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec)


def _grouped(path: Path, documents: Iterable[str]) -> Iterator[Piece]:
    """Yield texts in pieces of about `PIECE_BYTES`, numbered from 1."""
    some, size, first = list[str](), 0, 1
    for document in documents:
        if not isinstance(document, str):
            raise TypeError("the column has other values than text")
        # The rest of a text that is too long is not kept.
        some.append(document[: LONGEST + 1])
        size += len(some[-1])
        if size >= PIECE_BYTES:
            yield Piece(str(path), some, size, line=first)
            some, size, first = [], 0, first + len(some)
    if some:
        yield Piece(str(path), some, size, line=first)
