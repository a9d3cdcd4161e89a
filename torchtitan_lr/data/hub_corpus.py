# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Hugging Face datasets as a corpus: streamed in shards, or prepared on disk and read by rows.

A stream comes in shards (c4 has 1024) and cannot be split further. A stripe reads whole shards, so
the number of stripes is the largest divisor of the batch's rows that is no larger than the number
of shards. A stripe's position is the stream state of ``datasets``. A dataset on disk has rows that
are read in any order: it is cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan_lr.data.blocks import BlockCorpus, Split, TextOptions, file_stamp
from torchtitan_lr.data.encoding import Tokens
from torchtitan_lr.data.held_out import USUAL_LIMIT, document_hash
from torchtitan_lr.data.order import Order
from torchtitan_lr.data.stripes import DocumentStream
from torchtitan_lr.errors import ConfigError, DataError

C4 = {
    "c4": ("allenai/c4", TextOptions(hf_name="en")),
    "c4_validation": ("allenai/c4", TextOptions(hf_name="en", hf_split="validation")),
}
"""Datasets with a name of their own: path and options."""

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}
"""How ``datasets`` reads a single file."""

SHARDS_ON_DISK = 64
"""Shards of the stream of a dataset that ``save_to_disk`` wrote."""

MOST_ROWS = 1000
"""Rows of a block of a dataset on disk at most."""


def open_hub(
    path: str, key: str, options: TextOptions, split: Split, rows: int | None
) -> HubCorpus | RowCorpus:
    """Open a Hugging Face dataset, streamed or from disk.

    Args:
        path: Name on the Hub, or a folder or file.
        key: The TOML section to name in errors.
        options: Name, split, column, and whether to stream.
        split: The part that is read where no split of the dataset is held out.
        rows: Rows of the global batch, from which the size of blocks follows.

    Raises:
        ConfigError: The dataset cannot be opened, or has no such column.
    """
    held: Split = "all" if options.hf_held_out else split
    if options.hf_streaming:
        return HubCorpus("hf", path, key, options, held)
    return RowCorpus(path, key, options, held, rows)


def load(path: str, options: TextOptions, streaming: bool) -> Any:
    """Return a dataset of ``datasets``; a folder or file that exists needs no network."""
    from datasets import load_dataset, load_from_disk  # imported late: it takes a second

    place = Path(path)
    if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
        saved = load_from_disk(path)
        saved = saved[options.hf_split] if isinstance(saved, dict) else saved
        shards = min(SHARDS_ON_DISK, max(1, len(saved)))
        return saved.to_iterable_dataset(num_shards=shards) if streaming else saved
    if place.is_file():
        builder = BUILDERS[Path(place.name.removesuffix(".gz").removesuffix(".zst")).suffix]
        return load_dataset(builder, data_files=path, split=options.hf_split, streaming=streaming)
    return load_dataset(path, name=options.hf_name, split=options.hf_split, streaming=streaming)


def _open(name: str, path: str, key: str, options: TextOptions, streaming: bool) -> Any:
    """Return a dataset whose columns were checked, where they are known."""
    try:
        dataset = load(path, options, streaming)
        columns = dataset.column_names
    except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
        why = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key}.dataset",
            name,
            f"a dataset that opens at {path!r} ({type(error).__name__}: {why}); "
            f"without a network: --{key}.dataset=local --{key}.dataset_path=FILES for your own "
            f"text, or a local copy in {key}.dataset_path",
        ) from error
    if columns is not None and options.column not in columns:
        want = f"one of the columns of {path!r}: {', '.join(columns)}"
        raise ConfigError("training.text_column", options.column, want)
    return dataset


class HubCorpus:
    """A dataset as a stream.

    Args:
        name: ``c4``, ``c4_validation`` or ``hf``.
        path: Where to read it instead of the Hub, e.g. a local copy.
        key: The TOML section to name in errors.
        options: Name, split and column; by default those of ``name``.
        split: ``train`` leaves out one document in 200, ``validation`` reads these alone.

    Raises:
        ConfigError: The dataset cannot be opened, usually because there is no network.
    """

    def __init__(
        self,
        name: str,
        path: str | None,
        key: str,
        options: TextOptions | None = None,
        split: Split = "all",
    ) -> None:
        self.name = name
        usual, known = C4.get(name, ("", TextOptions()))
        self._path = path or usual
        self._options = options or known
        self._split = split
        self._named = options is not None
        self._dataset = _open(name, self._path, key, self._options, streaming=True)
        self.num_shards: int = self._dataset.num_shards

    def fingerprint(self) -> str:
        """Return the name, the last part of the path and the number of shards."""
        own = f" {_identity(self._options, self._split)}" if self._named else ""
        return f"{self.name} from={Path(self._path).name} shards={self.num_shards}{own}"

    def num_stripes(self, rows: int) -> int:
        """Return the largest divisor of ``rows`` that is no larger than the number of shards."""
        return max(n for n in range(1, min(rows, self.num_shards) + 1) if rows % n == 0)

    def stream(
        self, stripe: int, num_stripes: int, infinite: bool, order: Order | None = None
    ) -> DocumentStream:
        """Open one stripe: a contiguous run of shards, which no order changes."""
        return _HubStream(self, stripe, num_stripes, infinite)

    def __iter__(self) -> Iterator[str]:
        """Yield every document once, in the dataset's order."""
        for sample in self._dataset:
            if (text := self.text_of(sample)) is not None:
                yield text

    def open_shards(self, stripe: int, num_stripes: int) -> Any:
        """Return a fresh ``IterableDataset`` over the shards of one stripe."""
        return self._dataset.shard(num_shards=num_stripes, index=stripe)

    def text_of(self, sample: dict[str, Any]) -> str | None:
        """Return a sample's text, None if it is empty or of the other split."""
        text = _text(sample.get(self._options.column), self._options)
        return text if text and _wanted(text, self._split) else None


class _HubStream:
    """One stripe's documents.

    A position (JSON) is the pass over the shards and the stream state before the document.
    """

    def __init__(self, corpus: HubCorpus, stripe: int, num_stripes: int, infinite: bool) -> None:
        self._corpus = corpus
        self._stripe = stripe
        self._num_stripes = num_stripes
        self._infinite = infinite
        self.seek(None)

    def seek(self, position: Any) -> None:
        """Make the document at ``position`` the next one."""
        self._pass: int = 0 if position is None else position[0]
        self._state: dict[str, Any] | None = None if position is None else position[1]
        self._open()

    def _open(self) -> None:
        # Always open a new dataset: a resumed one starts its next pass at the resume point.
        self._shards = self._corpus.open_shards(self._stripe, self._num_stripes)
        if self._state is not None:
            self._shards.load_state_dict(self._state)
        self._samples = iter(self._shards)

    def next_document(
        self, unreadable: Callable[[DataError], None] | None = None
    ) -> tuple[Any, str] | None:
        """Return the next document and its position, or None after the last one."""
        ends = 0
        while ends < 2:
            try:
                sample = next(self._samples, None)
            except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
                why = f"{type(error).__name__}: {str(error)[:200]}"
                want = f"a dataset that can be read on ({why})"
                raise DataError("training.dataset", self._corpus.name, want) from error
            if sample is not None:
                position = [self._pass, self._state]
                self._state = self._shards.state_dict()
                if (text := self._corpus.text_of(sample)) is not None:
                    return position, text
                continue
            if not self._infinite:
                return None
            ends += 1
            self._pass, self._state = self._pass + 1, None
            self._open()
        raise ConfigError("training.dataset", self._corpus.name, "a shard with documents in it")

    def skip(self, error: DataError) -> None:
        """Raise the error: no record of a Hub stream may be skipped."""
        raise error

    def encoded(self, position: Any, tokens: Tokens) -> None:
        """Do nothing: the tokens of a Hub stream are not cached."""


class RowCorpus(BlockCorpus):
    """A dataset on disk: blocks of rows, read in any order.

    Args:
        path: Name on the Hub, or a folder or file.
        key: The TOML section to name in errors.
        options: Name, split and column.
        split: ``train`` leaves out one document in 200, ``validation`` reads these alone.
        rows: Rows of the global batch; each gets four blocks, of 1,000 rows at most.

    Raises:
        ConfigError: The dataset cannot be opened, or has no rows.
    """

    def __init__(
        self, path: str, key: str, options: TextOptions, split: Split, rows: int | None
    ) -> None:
        self._dataset = _open("hf", path, key, options, streaming=False)
        count = len(self._dataset)
        if not count:
            raise ConfigError(f"{key}.dataset", "hf", f"a dataset with rows ({path!r} has none)")
        self._options, self._split, self._path = options, split, path
        name = f"{Path(path).name} rows={count} {_identity(options, split)}"
        super().__init__("hf", f"{key}.dataset", [(name, self._dataset.dataset_size or 0)])
        self._size = MOST_ROWS if rows is None else max(1, min(MOST_ROWS, count // (4 * rows)))

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return -(-len(self._dataset) // self._size)

    def origin(self) -> str:
        """Return the dataset's name or folder."""
        return self._path

    def stamp(self, block: int) -> str | None:
        """Return the stamps of the dataset's files, the block's rows, and the held-out rule."""
        files = [file_stamp(Path(file["filename"])) for file in self._dataset.cache_files]
        if not files or None in files:
            return None
        return f"{files} {block}/{self.num_blocks} {_identity(self._options, self._split)}"

    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield the texts of one block's rows that belong to the split."""
        start = block * self._size
        rows = self._dataset[start : start + self._size][self._options.column]
        for text in (_text(value, self._options) for value in rows):
            if text and _wanted(text, self._split):
                yield text


def _text(value: object, options: TextOptions) -> str:
    if isinstance(value, str) or value is None:
        return value or ""
    raise DataError("training.text_column", options.column, f"a column of text, not {type(value)}")


def _wanted(text: str, split: Split) -> bool:
    return split == "all" or (document_hash(text) < USUAL_LIMIT) == (split == "validation")


def _identity(options: TextOptions, split: Split) -> str:
    named = f"name={options.hf_name} split={options.hf_split} column={options.column}"
    return named if split == "all" else f"{named} part={split}"
