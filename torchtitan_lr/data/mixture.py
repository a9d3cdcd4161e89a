# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Several corpora in one run, in given shares: ``[[training.mixture]]``.

Every window is of one corpus. Row ``i`` (of ``B``) of step ``n`` takes the corpus in whose interval
of ``[0, 1)`` the number ``frac(i φ + u_n)`` lies: ``φ`` is the golden ratio, which spreads the rows
of a batch evenly, and ``u_n`` is pseudo-random. So each batch has about the wanted shares, each row
is of every corpus in turn, and the choice is the same on every rank. A row has one stripe per
corpus, whose positions are stored; the corpora are read and shuffled as they are alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.blocks import BlockCorpus, Corpus, Split
from torchtitan_lr.data.corpora import Source, held_out_source, text_options
from torchtitan_lr.data.order import Order, unit_number
from torchtitan_lr.data.stripes import DocumentStream, Stripe
from torchtitan_lr.errors import ConfigError

OPTIONS = {"text_column": "column", "hf_name": "hf_name", "hf_split": "hf_split"}
"""Keys of an entry that replace the run's, and the options that they set."""

KEYS: dict[str, Any] = {"dataset": str, "path": str, "weight": (int, float), "name": str}
KEYS |= dict.fromkeys(OPTIONS, str)
"""Keys of an entry of ``training.mixture``; ``weight`` is 1 by default."""

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class MixtureSource:
    """What to mix; a :class:`Source` of several.

    Attributes:
        parts: The sources.
        names: A name for each, in logs.
        weights: The share of each, with the sum 1.
    """

    parts: tuple[Source, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    name: str = "mixture"
    path: str | None = None
    key: str = "training"

    @property
    def split(self) -> Split:
        """The split of all parts."""
        return self.parts[0].split

    def open(self, rows: int | None = None) -> Mixture:
        """Open all corpora; ``rows`` and errors as for :func:`build_corpus`."""
        return Mixture(self, [part.open(rows) for part in self.parts])

    def held_out(self) -> MixtureSource:
        """Return the held-out parts of all corpora."""
        return replace(self, parts=tuple(held_out_source(part) for part in self.parts))


class Mixture:
    """The opened corpora of a mixture, with the interface of a corpus.

    Attributes:
        corpora: The same.
        names: A name for each.
    """

    name = "mixture"

    def __init__(self, source: MixtureSource, corpora: Sequence[Corpus]) -> None:
        self.corpora = list(corpora)
        self.names = source.names
        self._weights = source.weights
        self._ends = np.cumsum(source.weights)[:-1]

    @property
    def pairs(self) -> bool:
        """Whether a part of it is a corpus of pairs."""
        return any(getattr(corpus, "pairs", False) for corpus in self.corpora)

    @property
    def skipped(self) -> set[str]:
        """Locations of the skipped records of all corpora."""
        return set().union(*(c.skipped for c in self.corpora if isinstance(c, BlockCorpus)))

    @skipped.setter
    def skipped(self, records: set[str]) -> None:
        for corpus in self.corpora:
            if isinstance(corpus, BlockCorpus):
                corpus.skipped = set(records)

    def fingerprint(self) -> str:
        """Return weights and fingerprints of all corpora."""
        each = zip(self._weights, self.corpora, strict=True)
        listed = " ".join(f"{weight:.6g}*({corpus.fingerprint()})" for weight, corpus in each)
        return f"mixture parts={len(self.corpora)} {listed}"

    def num_stripes(self, rows: int) -> int:
        """Return the largest number of stripes into which every corpus can be split."""
        return math.gcd(*(corpus.num_stripes(rows) for corpus in self.corpora))

    def stream(
        self, stripe: int, num_stripes: int, infinite: bool, order: Order | None = None
    ) -> DocumentStream:
        """Raise: a row of a mixture has one stream per corpus."""
        raise NotImplementedError("a mixture is read by MixedStripe")

    def __iter__(self) -> Iterator[str]:
        """Yield every document once, the corpora in turn."""
        rest: list[Iterator[str]] = [iter(corpus) for corpus in self.corpora]
        while rest:
            alive = []
            for documents in rest:
                if (found := next(documents, None)) is not None:
                    alive.append(documents)
                    yield found
            rest = alive

    def choose(self, step: int, rows: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
        """Return which corpus some rows of a step read.

        Args:
            step: The step, from 0.
            rows: Rows of the global batch (n,).
            seed: The seed of the reading order.

        Returns:
            Indices of corpora (n,).
        """
        places = (rows * GOLDEN + unit_number(seed, step)) % 1.0
        return np.searchsorted(self._ends, places, side="right")


class MixedStripe:
    """One row's windows: at each, the next one of the chosen corpus; used as a :class:`Stripe`.

    Args:
        mixture: Chooses the corpus.
        parts: A stripe of each corpus.
        rows: Rows of the global batch that this stripe has, ``range(first, first + n)``.
        seed: The seed of the reading order.
    """

    def __init__(self, mixture: Mixture, parts: list[Stripe], rows: range, seed: int) -> None:
        self._mixture = mixture
        self._parts = parts
        self._rows = np.arange(rows.start, rows.stop)
        self._seed = seed
        self._taken = 0

    def _next(self, windows: int) -> list[int]:
        """Return the corpora of the next windows."""
        size = len(self._rows)
        steps = range(self._taken // size, (self._taken + windows - 1) // size + 1)
        found = [self._mixture.choose(step, self._rows, self._seed) for step in steps]
        first = self._taken % size
        chosen: list[int] = np.concatenate(found)[first : first + windows].tolist()
        return chosen

    def demands(self, windows: int) -> list[tuple[Stripe, int]]:
        """Return the parts, and how many of the next windows each gives."""
        chosen = self._next(windows)
        counts = [(part, chosen.count(index)) for index, part in enumerate(self._parts)]
        return [(part, count) for part, count in counts if count]

    def take(self, windows: int) -> npt.NDArray[np.int64] | None:
        """Return the next windows; as :meth:`Stripe.take`."""
        found = []
        for index in self._next(windows):
            window = self._parts[index].take(1)
            if window is None:
                return None
            found.append(window)
        self._taken += windows
        return np.concatenate(found)

    def state(self) -> dict[str, Any]:
        """Return the positions in all corpora, and the number of windows (JSON)."""
        parts = [part.state() for part in self._parts]
        order = parts[0].get("order")
        return {"parts": parts, "taken": self._taken} | ({"order": order} if order else {})

    def load_state(self, state: dict[str, Any], changed: bool = False) -> None:
        """Go to a position that :meth:`state` returned; as :meth:`Stripe.load_state`."""
        for part, position in zip(self._parts, state["parts"], strict=True):
            part.load_state(position, changed)
        self._taken = int(state["taken"])


class SharesSeen:
    """Counts the windows of each corpus that all ranks together have read.

    Attributes:
        counts: Windows by corpus, as a list (JSON).
    """

    def __init__(self, mixture: Mixture, rows: int) -> None:
        self._mixture = mixture
        self._rows = rows
        self.counts = [0] * len(mixture.names)

    def add(self, start: int, stop: int, seed: int) -> None:
        """Count the samples ``start`` to ``stop`` of the run, all of one step."""
        rows = np.arange(start, stop) - start // self._rows * self._rows
        found = self._mixture.choose(start // self._rows, rows, seed)
        more = np.bincount(found, minlength=len(self.counts)).tolist()
        self.counts = [count + new for count, new in zip(self.counts, more, strict=True)]

    def shares(self) -> dict[str, float]:
        """Return the share of each corpus in what was read, by ``data_share/<name>``."""
        total = max(1, sum(self.counts))
        names = self._mixture.names
        return {f"data_share/{n}": c / total for n, c in zip(names, self.counts, strict=True)}


def mixture_source(training: Any) -> MixtureSource | None:
    """Return the mixture of ``[[training.mixture]]``, None if there is none.

    Args:
        training: The section ``training`` of a run's ``JobConfig``, or of its saved record.

    Raises:
        ConfigError: An entry is not valid.
    """
    given = getattr(training, "mixture", None) or []
    entries = [entry if isinstance(entry, dict) else vars(entry) for entry in given]
    if not entries:
        return None
    if training.dataset_path:
        want = "no path beside [[training.mixture]], whose entries have their own"
        raise ConfigError("training.dataset_path", training.dataset_path, want)
    parts, names, weights = [], [], []
    most = getattr(training, "max_bad_records", 0)
    for index, entry in enumerate(entries):
        _check(entry, f"training.mixture[{index}]")
        path = entry.get("path")
        own = {option: entry[name] for name, option in OPTIONS.items() if name in entry}
        options = text_options(training, **own)
        parts.append(Source(entry["dataset"], path, "train", "training", most, options))
        names.append(entry.get("name") or entry["dataset"])
        weights.append(float(entry.get("weight", 1)))
    if len(set(names)) < len(names):
        want = "entries with different names: name = '...' tells entries of one dataset apart"
        raise ConfigError("training.mixture", names, want)
    total = sum(weights)
    return MixtureSource(tuple(parts), tuple(names), tuple(weight / total for weight in weights))


def _check(entry: dict[str, Any], key: str) -> None:
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
