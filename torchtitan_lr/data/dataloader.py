# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training loader: a rank's rows of the global batch, resumable at any data-parallel size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lr.checkpoints.safe_metadata import DamagedError, load, read_metadata
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.config.schema import STEPS_AHEAD
from torchtitan_lr.data.batches import BatchReader, MicroBatch, Prepared, Rows
from torchtitan_lr.data.blocks import BlockCorpus, Corpus
from torchtitan_lr.data.chat_template import ChatTemplate
from torchtitan_lr.data.checks import check_workers
from torchtitan_lr.data.corpora import training_source
from torchtitan_lr.data.documents import DocumentBorders
from torchtitan_lr.data.encoding import tokenizer_identity
from torchtitan_lr.data.mixture import Mixture, SharesSeen
from torchtitan_lr.data.order import Order
from torchtitan_lr.data.read_ahead import JOIN_SECONDS, ReadAhead
from torchtitan_lr.data.token_cache import TokenCache
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import BaseTokenizer
from torchtitan_lr.titan.components import BaseDataLoader


class StripeDataLoader(BaseDataLoader):
    """Yields this rank's micro-batches; rows are read from :mod:`torchtitan_lr.data.stripes`.

    Micro-batch ``m`` of a step holds the global rows ``m * D * b + r * b + i`` with ``D`` ranks,
    this rank ``r``, local batch ``b`` and ``0 <= i < b``. If the corpus has fewer stripes than the
    batch has rows (c4 has 1024 shards), consecutive rows share a stripe.

    A new iterator continues at the loader's position. The position is that behind the last
    micro-batch that was yielded, whatever the thread has read ahead. Errors are raised, and
    skipped records counted, with the micro-batch that needs the record.

    Args:
        corpus: The corpus to read.
        tokenizer: Encodes the documents.
        seq_len: Tokens per input row.
        local_batch_size: ``b``, rows per micro-batch.
        global_batch_size: ``B``, rows per step over all ranks.
        dp_world_size: ``D``, number of data-parallel ranks.
        dp_rank: ``r``, this rank.
        infinite: Whether to start over at the end of the corpus. Otherwise a rank stops when the
            first of its stripes has no full window left; ranks may stop at different steps.
        pin_memory: Whether to put the batches in pinned memory (only with CUDA).
        allow_changed: Whether a position in a changed corpus of the same kind may be loaded.
        steps_ahead: Steps whose micro-batches a thread prepares before they are used; 0 reads
            each when it is used.
        order: The shuffled order; None for the fixed one. A loaded position's own order replaces
            it.
        borders: Keeps the documents of a row apart; None to let them see each other.

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
        steps_ahead: int = STEPS_AHEAD,
        order: Order | None = None,
        borders: DocumentBorders | None = None,
    ) -> None:
        self._corpus = corpus
        self._allow_changed = allow_changed
        self._rows = Rows.of(corpus, local_batch_size, global_batch_size, dp_world_size, dp_rank)
        pin_memory = pin_memory and torch.cuda.is_available()
        self._fingerprint = corpus_fingerprint(corpus, tokenizer)
        self._reader = BatchReader(
            corpus, tokenizer, self._rows, seq_len, infinite, pin_memory, order, borders
        )
        self._depth = steps_ahead * self._rows.microbatches
        self._batches: Iterator[Prepared] | None = None
        self._end: Prepared | None = None
        # The position behind the last micro-batch that was yielded; the reader is ahead of it.
        self._sample_index = 0
        self._positions = self._reader.positions()
        self._bad_records: set[str] = set()
        if isinstance(corpus, BlockCorpus | Mixture):
            self._bad_records |= corpus.skipped
        self._seen = SharesSeen(corpus, global_batch_size) if isinstance(corpus, Mixture) else None
        self._mark: tuple[int, dict[int, Any], list[int]] | None = None

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield ``({"input": (b, s)}, labels (b, s))``, int64, on the CPU.

        With ``borders`` the inputs have ``"documents"`` (b, s) as well.
        """
        while True:
            prepared = self._end or next(self._read())
            # Advance before the yield: checkpoints are saved while the generator is suspended.
            if self._seen is not None and prepared.batch is not None:
                seed = 0 if self._reader.order is None else self._reader.order.seed
                self._seen.add(self._sample_index, prepared.sample_index, seed)
            self._sample_index = prepared.sample_index
            self._positions |= prepared.positions
            self._bad_records |= prepared.skipped
            if prepared.batch is None:
                self._end = prepared
                if prepared.error is not None:
                    raise prepared.error
                return
            yield prepared.batch

    def _read(self) -> Iterator[Prepared]:
        """Return what prepares the micro-batches; the first call starts the thread."""
        if self._batches is None:
            batches = self._reader.read()
            self._batches = ReadAhead(batches, self._depth) if self._depth else batches
        return self._batches

    def close(self) -> None:
        """End the thread that reads ahead; what it has read is dropped."""
        self._stop(JOIN_SECONDS)

    def _stop(self, seconds: float | None = None) -> None:
        if isinstance(self._batches, ReadAhead):
            self._batches.close(seconds)
        self._batches = self._end = None

    @property
    def bad_records(self) -> set[str]:
        """Locations of the records that this rank skipped."""
        return self._bad_records

    @property
    def microbatches(self) -> int:
        """Micro-batches per step of this rank."""
        return self._rows.microbatches

    @property
    def pairs(self) -> bool:
        """Whether the rows are pairs, whose answers alone are labels."""
        return getattr(self._corpus, "pairs", False)

    def shares(self) -> dict[str, float]:
        """Return the share of each corpus of a mixture in what all ranks have read; else empty."""
        return {} if self._seen is None else self._seen.shares()

    def mark(self) -> None:
        """Store the position, so that a step with unreadable data can be undone."""
        seen = [] if self._seen is None else self._seen.counts
        self._mark = (self._sample_index, dict(self._positions), seen)

    def return_to_mark(self) -> None:
        """Make :meth:`state_dict` return the position of the last :meth:`mark`, for the checkpoint.

        Do not read from the loader afterwards: the reader itself is not rewound.
        """
        if self._mark is None:
            raise RuntimeError("there is no mark to return to")
        self._sample_index, self._positions = self._mark[0], dict(self._mark[1])
        if self._seen is not None:
            self._seen.counts = self._mark[2]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with one entry per stripe, so that any rank can load its own.

        Returns:
            ``sample_index`` (samples consumed by all ranks together), ``global_batch_size``,
            ``corpus`` (its fingerprint) and ``lane_<j>`` (JSON) for the stripes of this rank. The
            first stripe's entry also lists the records that this rank skipped.
        """
        state = self._identity()
        bad = {"bad_records": sorted(self.bad_records)} if self.bad_records else {}
        seen = {} if self._seen is None else {"seen": self._seen.counts}
        for stripe, position in self._positions.items():
            state[f"lane_{stripe}"] = json.dumps(position | bad | seen)
            bad = {}
        return state

    def _identity(self) -> dict[str, Any]:
        return {
            "sample_index": self._sample_index,
            "global_batch_size": self._rows.total,
            "corpus": self._fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a stored position.

        Args:
            state_dict: Result of :meth:`state_dict`, with the entries of this rank's stripes.

        Raises:
            ConfigError: The position belongs to another global batch size or another corpus.
        """
        if not state_dict:
            return
        self._check_identity(state_dict)
        sample_index = int(state_dict["sample_index"])
        row = sample_index % self._rows.total
        if row % self._rows.stride:
            raise ConfigError(
                "training.local_batch_size",
                self._rows.local,
                f"a split that has a micro-batch border at row {row}",
            )
        changed = state_dict["corpus"] != self._fingerprint
        self._stop()
        positions = {stripe: json.loads(state_dict[f"lane_{stripe}"]) for stripe in self._positions}
        for position in positions.values():
            self._bad_records.update(position.pop("bad_records", []))
            if (seen := position.pop("seen", None)) and self._seen is not None:
                self._seen.counts = seen
        if isinstance(self._corpus, BlockCorpus | Mixture):
            self._corpus.skipped = set(self._bad_records)
        wanted = self._reader.order
        self._reader.seek(sample_index, positions, changed)
        if self._reader.order != wanted and self._rows.rank == 0:
            logger.info(f"Data continue in the checkpoint's order: {_named(self._reader.order)}")
        self._positions = self._reader.positions()
        self._sample_index = sample_index

    def check_checkpoint(self, checkpoint_id: str, metadata: Metadata | None = None) -> None:
        """Raise if a checkpoint has another batch size or corpus; call this before loading it.

        DCP stops at the first missing key, and a larger batch has more stripes than were saved.
        This check comes first, so that the error names the changed setting and not a missing key.

        Raises:
            ConfigError: The checkpoint belongs to another global batch size or another corpus.
        """
        stored = {"dataloader": self._identity()}
        # no_dist: each rank reads three small values without a collective, so any rank may raise.
        load(stored, checkpoint_id, no_dist=True, metadata=metadata)
        self._check_identity(stored["dataloader"])

    def _check_identity(self, stored: dict[str, Any]) -> None:
        check_same_batch(stored, self._rows.total)
        if check_same_corpus(stored, self._fingerprint, self._allow_changed):
            logger.warning(f"The corpus was {stored['corpus']} and is {self._fingerprint}")


def check_same_batch(stored: dict[str, Any], rows: int) -> None:
    """Compare a run's sequences per step with those of a stored position.

    Raises:
        ConfigError: They differ.
    """
    if int(stored["global_batch_size"]) != rows:
        raise ConfigError(
            "training.global_batch_size",
            rows,
            f"{stored['global_batch_size']} as in the checkpoint: its data position counts "
            "rows of that batch (-1 means local_batch_size * data-parallel size)",
        )


def check_same_corpus(stored: dict[str, Any], here: str, may_change: bool) -> bool:
    """Compare the fingerprint of a run's corpus with that of a stored position.

    Returns:
        Whether the corpus has changed, as ``may_change`` allows.

    Raises:
        ConfigError: It is another corpus.
    """
    if stored["corpus"] == here:
        return False
    want = f"{stored['corpus']} as in the checkpoint"
    if _same_kind(stored["corpus"], here):
        if may_change:
            return True
        want += ", or training.allow_changed_corpus = true to continue with the changed corpus"
    raise ConfigError("training.dataset", here, want)


def stored_identity(step_dir: str) -> dict[str, Any] | None:
    """Read the batch and the corpus of a checkpoint's position.

    Returns:
        ``global_batch_size`` and ``corpus``; None for a checkpoint without a position, or with a
        damaged one, which loading it reports.
    """
    stored = {"dataloader": {"global_batch_size": 0, "corpus": ""}}
    try:
        metadata = read_metadata(step_dir)
        if any(name.startswith("dataloader.") for name in metadata.state_dict_metadata):
            load(stored, step_dir, no_dist=True, metadata=metadata)
            return stored["dataloader"]
    except (DamagedError, CheckpointException):  # the latter derives from BaseException
        pass
    return None


def _named(order: Order | None) -> str:
    if order is None:
        return "training.shuffle = false"
    return f"training.shuffle_seed = {order.seed}, training.shuffle_tokens = {order.tokens}"


def build_dataloader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: Any,
    infinite: bool = True,
) -> StripeDataLoader:
    """Build the training loader of one data-parallel rank (a ``TrainSpec``'s hook).

    Args:
        dp_world_size: Data-parallel ranks.
        dp_rank: This rank.
        tokenizer: The run's tokenizer.
        job_config: The run's ``JobConfig``; section ``training`` is read.
        infinite: Whether to start over at the end of the corpus.

    Returns:
        The loader. Building it lists files and opens the first block of each of the rank's stripes.

    Raises:
        ConfigError: As for :class:`StripeDataLoader` and :func:`build_corpus`, or worker processes
            are configured.
    """
    training = job_config.training
    check_workers(training.dataloader, "training")
    rows = training.global_batch_size
    if rows < 0:
        rows = training.local_batch_size * dp_world_size
    corpus = training_source(job_config).open(rows)
    for part in corpus.corpora if isinstance(corpus, Mixture) else [corpus]:
        if not isinstance(part, BlockCorpus):
            continue
        if not part.pairs:
            part.cache = _token_cache(job_config, part, tokenizer)
        if part.num_blocks < rows and dp_rank == 0:
            logger.warning(
                f"{part.name} has {part.num_blocks} blocks for {rows} rows of a batch: "
                "some rows will have the same text"
            )
    return StripeDataLoader(
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
        steps_ahead=getattr(training, "steps_ahead", STEPS_AHEAD),
        order=_order(job_config),
        borders=DocumentBorders.of(job_config, tokenizer),
    )


def _order(job_config: Any) -> Order | None:
    """Return the order that a run's configuration sets; the record of an old run sets none."""
    training = job_config.training
    if not getattr(training, "shuffle", False):
        return None
    seed = training.shuffle_seed
    if seed is None:
        seed = job_config.debug.seed or 0
    return Order(seed, training.shuffle_tokens)


def _token_cache(
    job_config: Any, corpus: BlockCorpus, tokenizer: BaseTokenizer
) -> TokenCache | None:
    """Return the cache of a corpus; None if it is turned off or the tokenizer is not known."""
    folder = getattr(job_config.training, "token_cache", "")
    identity = tokenizer_identity(tokenizer)
    if not folder or identity is None:
        return None
    place = Path(job_config.job.dump_folder) / user_path(folder, "training.token_cache")
    return TokenCache(place, f"{corpus.origin()} {corpus.fingerprint()}", identity)


def corpus_fingerprint(corpus: Corpus, tokenizer: BaseTokenizer) -> str:
    """Return the corpus' fingerprint; that of chats includes their template."""
    line = corpus.fingerprint()
    if getattr(corpus, "pairs", False) and (digest := ChatTemplate.of(tokenizer).digest):
        line += f" template={digest}"
    return line


def _same_kind(fingerprint: str, other: str) -> bool:
    """Return whether a position in one corpus can be used in another.

    Both must be the same corpus by name; Hub streams must also have the same number of shards.
    """

    def kind(text: str) -> list[str]:
        name, *rest = text.split()
        return [name, *(word for word in rest if word.startswith(("shards=", "parts=")))]

    return kind(fingerprint) == kind(other)
