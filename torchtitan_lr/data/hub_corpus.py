# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's Hugging Face streams (c4) as stripes.

A stream comes in shards (c4 has 1024) and cannot be split further. A stripe reads whole shards, so
the number of stripes is the largest divisor of the batch's rows that is no larger than the number
of shards. A stripe's position is the stream state of ``datasets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_lr.data.encoding import Tokens
from torchtitan_lr.data.order import Order
from torchtitan_lr.data.stripes import DocumentStream
from torchtitan_lr.errors import ConfigError, DataError


class HubCorpus:
    """A dataset from torchtitan's table, streamed.

    Args:
        name: Its name in that table.
        path: A path to read instead of the Hub, e.g. a local copy.
        key: The TOML section to name in errors.

    Raises:
        ConfigError: The dataset cannot be opened, usually because there is no network.
    """

    def __init__(self, name: str, path: str | None, key: str) -> None:
        entry = DATASETS[name]
        self.name = name
        self._path = path or entry.path
        self._text = entry.sample_processor
        try:
            self._dataset = entry.loader(self._path)
        except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
            raise ConfigError(
                f"{key}.dataset",
                name,
                f"a dataset that opens at {self._path!r} ({type(error).__name__}: "
                f"{str(error)[:200]}); without a network set {key}.dataset_path to a local copy",
            ) from error
        self.num_shards: int = self._dataset.num_shards

    def fingerprint(self) -> str:
        """Return the name, the last part of the path and the number of shards."""
        return f"{self.name} from={Path(self._path).name} shards={self.num_shards}"

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
            yield self._text(sample)

    def open_shards(self, stripe: int, num_stripes: int) -> Any:
        """Return a fresh ``IterableDataset`` over the shards of one stripe."""
        return self._dataset.shard(num_shards=num_stripes, index=stripe)

    def text_of(self, sample: dict[str, Any]) -> str:
        """Return a sample's text."""
        return self._text(sample)


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
        for _ in range(2):
            try:
                sample = next(self._samples, None)
            except Exception as error:  # datasets, its HTTP layer and its parsers raise any type
                why = f"{type(error).__name__}: {str(error)[:200]}"
                want = f"a dataset that can be read on ({why})"
                raise DataError("training.dataset", self._corpus.name, want) from error
            if sample is not None:
                position = [self._pass, self._state]
                self._state = self._shards.state_dict()
                return position, self._corpus.text_of(sample)
            if not self._infinite:
                return None
            self._pass, self._state = self._pass + 1, None
            self._open()
        raise ConfigError("training.dataset", self._corpus.name, "a shard with documents in it")

    def skip(self, error: DataError) -> None:
        """Raise the error: no record of a Hub stream may be skipped."""
        raise error

    def encoded(self, position: Any, tokens: Tokens) -> None:
        """Do nothing: the tokens of a Hub stream are not cached."""
