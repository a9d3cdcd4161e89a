# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training loader: a rank's rows of the global batch, resumable at any data-parallel size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan_lr.checkpoints.safe_metadata import load
from torchtitan_lr.data.checks import check_workers
from torchtitan_lr.data.corpora import BlockCorpus, Corpus, training_source
from torchtitan_lr.data.lanes import Lane
from torchtitan_lr.errors import ConfigError


class LaneDataLoader(BaseDataLoader):
    """Yields this rank's micro-batches; rows are read from :mod:`torchtitan_lr.data.lanes`.

    Micro-batch ``m`` of a step holds the global rows ``m * D * b + r * b + i`` with ``D`` ranks,
    this rank ``r``, local batch ``b`` and ``0 <= i < b``. If the corpus has fewer lanes than the
    batch has rows (c4 has 1024 shards), consecutive rows share a lane.

    A new iterator continues at the loader's position.

    Args:
        corpus: The corpus to read.
        tokenizer: Encodes the documents.
        seq_len: Tokens per input row.
        local_batch_size: ``b``, rows per micro-batch.
        global_batch_size: ``B``, rows per step over all ranks.
        dp_world_size: ``D``, number of data-parallel ranks.
        dp_rank: ``r``, this rank.
        infinite: Whether to start over at the end of the corpus. Otherwise a rank stops when the
            first of its lanes has no full window left; ranks may stop at different steps.
        pin_memory: Whether to put the batches in pinned memory (only with CUDA).
        allow_changed: Whether a position in a changed corpus of the same kind may be loaded.

    Raises:
        ConfigError: The batch sizes do not divide, or the corpus cannot be split that way.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        *,
        seq_len: int,
        local_batch_size: int,
        global_batch_size: int,
        dp_world_size: int,
        dp_rank: int,
        infinite: bool = True,
        pin_memory: bool = False,
        allow_changed: bool = False,
    ) -> None:
        self._corpus = corpus
        self._batch = local_batch_size
        self._rows = global_batch_size
        self._stride = dp_world_size * local_batch_size
        self._first = dp_rank * local_batch_size
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._allow_changed = allow_changed
        self._sample_index = 0
        self._mark: tuple[int, dict[int, Any]] | None = None
        self._at_mark = False
        _check_batch(self._rows, local_batch_size, dp_world_size)
        num_lanes = corpus.num_lanes(self._rows)
        self._rows_per_lane = _rows_per_lane(corpus, self._rows, num_lanes, local_batch_size)
        owned = sorted(
            {
                self._lane_of(micro_batch + self._first + i)
                for micro_batch in range(0, self._rows, self._stride)
                for i in range(local_batch_size)
            }
        )
        self._lanes = {
            lane: Lane(corpus.stream(lane, num_lanes, infinite), tokenizer, seq_len)
            for lane in owned
        }

    def _lane_of(self, row: int) -> int:
        return row // self._rows_per_lane

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64, on the CPU."""
        while True:
            start = self._sample_index % self._rows + self._first
            windows: list[list[int]] = []
            for row in range(start, start + self._batch):
                window = self._lanes[self._lane_of(row)].next_window()
                if window is None:
                    return
                windows.append(window)
            batch = torch.tensor(windows, dtype=torch.int64)
            if self._pin_memory:
                batch = batch.pin_memory()
            # Advance before the yield: checkpoints are saved while the generator is suspended.
            self._sample_index += self._stride
            yield {"input": batch[:, :-1].contiguous()}, batch[:, 1:].contiguous()

    @property
    def bad_records(self) -> set[str]:
        """Locations of the records that this rank skipped."""
        return self._corpus.skipped if isinstance(self._corpus, BlockCorpus) else set()

    def mark(self) -> None:
        """Store the position, so that a step with unreadable data can be undone."""
        positions = {lane: reader.state() for lane, reader in self._lanes.items()}
        self._mark = (self._sample_index, positions)

    def return_to_mark(self) -> None:
        """Make :meth:`state_dict` return the position of the last :meth:`mark`, for the checkpoint.

        Do not read from the loader afterwards: the lanes themselves are not rewound.
        """
        if self._mark is None:
            raise RuntimeError("there is no mark to return to")
        self._sample_index = self._mark[0]
        self._at_mark = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with one entry per lane so that any rank can load the lanes it owns.

        Returns:
            ``sample_index`` (samples consumed by all ranks together), ``global_batch_size``,
            ``corpus`` (its fingerprint) and ``lane_<j>`` (JSON) for the lanes of this rank. The
            first lane's entry also lists the records that this rank skipped.
        """
        state = self._identity()
        positions = {lane: reader.state() for lane, reader in self._lanes.items()}
        if self._at_mark and self._mark is not None:
            positions = self._mark[1]
        bad = {"bad_records": sorted(self.bad_records)} if self.bad_records else {}
        for lane, position in positions.items():
            state[f"lane_{lane}"] = json.dumps(position | bad)
            bad = {}
        return state

    def _identity(self) -> dict[str, Any]:
        return {
            "sample_index": self._sample_index,
            "global_batch_size": self._rows,
            "corpus": self._corpus.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a stored position.

        Args:
            state_dict: Result of :meth:`state_dict`, with the entries of this rank's lanes.

        Raises:
            ConfigError: The position belongs to another global batch size or another corpus.
        """
        if not state_dict:
            return
        self._check_identity(state_dict)
        sample_index = int(state_dict["sample_index"])
        if sample_index % self._rows % self._stride:
            raise ConfigError(
                "training.local_batch_size",
                self._batch,
                f"a split that has a micro-batch border at row {sample_index % self._rows}",
            )
        changed = state_dict["corpus"] != self._corpus.fingerprint()
        for lane, reader in self._lanes.items():
            position = json.loads(state_dict[f"lane_{lane}"])
            self.bad_records.update(position.pop("bad_records", []))
            reader.load_state(position, changed)
        self._sample_index = sample_index

    def check_checkpoint(self, checkpoint_id: str, metadata: Metadata | None = None) -> None:
        """Raise if a checkpoint has another batch size or corpus; call this before loading it.

        DCP stops at the first missing key, and a larger batch has more lanes than were saved. This
        check comes first, so that the error names the changed setting and not a missing key.

        Args:
            checkpoint_id: A DCP folder in which this loader was saved as ``dataloader``.
            metadata: Its table of contents, where it has been read already.

        Raises:
            ConfigError: The checkpoint belongs to another global batch size or another corpus.
        """
        stored = {"dataloader": self._identity()}
        # no_dist: each rank reads three small values without a collective, so any rank may raise.
        load(stored, checkpoint_id, no_dist=True, metadata=metadata)
        self._check_identity(stored["dataloader"])

    def _check_identity(self, stored: dict[str, Any]) -> None:
        here = self._identity()
        if int(stored["global_batch_size"]) != self._rows:
            raise ConfigError(
                "training.global_batch_size",
                self._rows,
                f"{stored['global_batch_size']} as in the checkpoint: its data position counts "
                "rows of that batch (-1 means local_batch_size * data-parallel size)",
            )
        if stored["corpus"] == here["corpus"]:
            return
        want = f"{stored['corpus']} as in the checkpoint"
        if _same_kind(stored["corpus"], here["corpus"]):
            if self._allow_changed:
                logger.warning(f"The corpus was {stored['corpus']} and is {here['corpus']}")
                return
            want += ", or training.allow_changed_corpus = true to continue with the changed corpus"
        raise ConfigError("training.dataset", here["corpus"], want)


def build_dataloader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: Any,
    infinite: bool = True,
) -> LaneDataLoader:
    """Build the training loader of one data-parallel rank (a ``TrainSpec``'s hook).

    Args:
        dp_world_size: Data-parallel ranks.
        dp_rank: This rank.
        tokenizer: The run's tokenizer.
        job_config: The run's ``JobConfig``; section ``training`` is read.
        infinite: Whether to start over at the end of the corpus.

    Returns:
        The loader. Building it lists files and opens the first block of each of the rank's lanes.

    Raises:
        ConfigError: As for :class:`LaneDataLoader` and :func:`build_corpus`, or worker processes
            are configured.
    """
    training = job_config.training
    check_workers(training.dataloader, "training")
    rows = training.global_batch_size
    if rows < 0:
        rows = training.local_batch_size * dp_world_size
    corpus = training_source(job_config).open(rows)
    if isinstance(corpus, BlockCorpus) and corpus.num_blocks < rows and dp_rank == 0:
        logger.warning(
            f"{corpus.name} has {corpus.num_blocks} blocks for {rows} rows of a batch: "
            "some rows will have the same text"
        )
    return LaneDataLoader(
        corpus,
        tokenizer,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=rows,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        infinite=infinite,
        pin_memory=training.dataloader.pin_memory,
        allow_changed=getattr(training, "allow_changed_corpus", False),
    )


def _same_kind(fingerprint: str, other: str) -> bool:
    """Return whether a position in one corpus can be used in another.

    Both must be the same corpus by name; Hub streams must also have the same number of shards.
    """

    def kind(text: str) -> list[str]:
        name, *rest = text.split()
        return [name, *(word for word in rest if word.startswith("shards="))]

    return kind(fingerprint) == kind(other)


def _check_batch(rows: int, local_batch_size: int, dp_world_size: int) -> None:
    if rows <= 0 or rows % (local_batch_size * dp_world_size):
        raise ConfigError(
            "training.global_batch_size",
            rows,
            f"a multiple of {local_batch_size * dp_world_size} (local_batch_size "
            f"{local_batch_size} * data-parallel size {dp_world_size})",
        )


def _rows_per_lane(corpus: Corpus, rows: int, num_lanes: int, local_batch_size: int) -> int:
    """Return how many rows share a lane; they must lie in one micro-batch, so on one rank."""
    shared = rows // num_lanes
    if local_batch_size % shared:
        below, above = local_batch_size // shared * shared, -(-local_batch_size // shared) * shared
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            "training.local_batch_size",
            local_batch_size,
            f"{nearest}: {corpus.name} splits into {num_lanes} streams, so {shared} rows of the "
            f"global batch of {rows} share a stream and must be on one rank",
        )
    return shared
