# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data lanes: each row of the global batch reads its own stream, on whichever rank it is computed.

These lanes are unrelated to the lanes of CAAT-Net (``[caat] lanes``), which split a model.

A loader that splits the corpus over *ranks* yields different batches when the number of ranks
changes. This one splits it over the rows of the **global** batch. Row ``j`` (of ``B``) is a
*lane*: an endless stream over the blocks ``j, j + B, j + 2B, ...`` of the corpus. Its documents are
tokenised, concatenated and cut into windows of ``seq_len + 1`` tokens exactly as in torchtitan's
``HuggingFaceTextDataset`` (input ``x[:-1]``, labels ``x[1:]``; windows do not overlap). The content
of row ``j`` does not depend on the rank or the micro-batch that computes it. Therefore:

* the batches are the same for any data-parallel size and any split between ranks and gradient
  accumulation, as long as ``B`` is unchanged;
* a rank tokenises only its own rows, so no work is repeated.

A lane's position is three integers: block counter, document in the block, token offset in the
document. No token buffer is stored: on resume the lane tokenises the current document again and
drops ``offset`` tokens. Sample ``n = step * B + j`` of the run is the ``step``-th window of lane
``j``, so the number of consumed samples is the position of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan.components.tokenizer import BaseTokenizer

    from torchtitan_lr.data.corpora import BlockCorpus


class DocumentStream(Protocol):
    """A resumable sequence of documents."""

    def next_document(self) -> tuple[Any, str] | None:
        """Return ``(position, text)`` of the next document, or None at the end.

        ``position`` is a JSON value; :meth:`seek` with it makes this document the next one.
        """
        ...

    def seek(self, position: Any) -> None:
        """Make the document at ``position`` the next one; None is the start of the stream."""
        ...


def lane_block(lane: int, num_lanes: int, num_blocks: int, k: int) -> int:
    """Return the index of the ``k``-th block that a lane reads.

    The plain rule ``(lane + k * num_lanes) mod num_blocks`` would keep a lane on the same few
    blocks forever if the two numbers share a factor. Therefore every lane moves on by one block
    after each full turn through them. Over its first ``num_blocks`` blocks a lane reads each block
    of the corpus exactly once, and at any time the lanes together cover the corpus evenly.

    Args:
        lane: The lane, ``0 <= lane < num_lanes``.
        num_lanes: Number of lanes that share the corpus.
        num_blocks: Number of blocks in the corpus.
        k: Number of blocks that the lane has read before.

    Returns:
        A block index in ``[0, num_blocks)``.
    """
    turn = num_blocks // gcd(num_blocks, num_lanes)
    return (lane + k * num_lanes + k // turn) % num_blocks


class BlockStream:
    """The documents of one lane of a :class:`BlockCorpus`.

    Positions are ``[k, d]``: document ``d`` of the lane's ``k``-th block.

    Args:
        corpus: The corpus.
        lane: Index of this lane.
        num_lanes: Number of lanes that share the corpus.
        infinite: Whether to start over at the end; otherwise the lane ends after one pass.
    """

    def __init__(self, corpus: BlockCorpus, lane: int, num_lanes: int, infinite: bool) -> None:
        self._corpus = corpus
        self._lane = lane
        self._num_lanes = num_lanes
        self._infinite = infinite
        self.seek(None)

    def seek(self, position: Any) -> None:
        """Make document ``d`` of the ``k``-th block the next one, ``position = [k, d]``."""
        self._k, skip = (0, 0) if position is None else (int(position[0]), int(position[1]))
        self._d = 0
        self._documents: Iterator[str | DataError] = self._open(self._k)
        for _ in range(skip):  # unreadable records count, skipped or not
            if next(self._documents, None) is None:
                break
            self._d += 1

    def next_document(self) -> tuple[Any, str] | None:
        """Return the next document and its ``[k, d]``, or None after the last one."""
        for _ in range(self._corpus.num_blocks + 1):
            for text in self._documents:
                self._d += 1
                if isinstance(text, str):
                    return [self._k, self._d - 1], text
                self._corpus.skip(text)
            if not self._infinite and self._last_of_pass(self._k):
                return None
            self._k, self._d = self._k + 1, 0
            self._documents = self._open(self._k)
        # The last num_blocks blocks were all blocks of the corpus (see lane_block).
        raise ConfigError(self._corpus.key, self._corpus.name, "a corpus with some text in it")

    def _last_of_pass(self, k: int) -> bool:
        return self._lane + (k + 1) * self._num_lanes >= self._corpus.num_blocks

    def _open(self, k: int) -> Iterator[str | DataError]:
        if not self._infinite and self._lane + k * self._num_lanes >= self._corpus.num_blocks:
            return iter(())
        block = lane_block(self._lane, self._num_lanes, self._corpus.num_blocks, k)
        return self._corpus.documents(block)


class Lane:
    """One stream of windows, cut from tokenised and concatenated documents.

    Args:
        stream: The lane's documents.
        tokenizer: Encodes the documents; begin and end tokens are added.
        seq_len: Tokens of an input; a window has one more.
    """

    def __init__(self, stream: DocumentStream, tokenizer: BaseTokenizer, seq_len: int) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._window = seq_len + 1
        self._position: Any = None
        self._tokens: list[int] = []
        self._offset = 0

    def next_window(self) -> list[int] | None:
        """Return the next ``seq_len + 1`` tokens, or None when the stream has ended."""
        window: list[int] = []
        while len(window) < self._window:
            if self._offset >= len(self._tokens) and not self._next_document():
                return None
            end = self._offset + self._window - len(window)
            window += self._tokens[self._offset : end]
            self._offset = min(end, len(self._tokens))
        return window

    def state(self) -> dict[str, Any]:
        """Return the position of the next token: the document and the offset in it (JSON)."""
        return {"document": self._position, "offset": self._offset}

    def load_state(self, state: dict[str, Any], changed: bool = False) -> None:
        """Go to a position that :meth:`state` returned.

        Args:
            state: The position.
            changed: Whether the corpus may have changed since; then the position is approximate.

        Raises:
            ConfigError: The document is shorter than the offset: it or the tokenizer has changed.
        """
        self._stream.seek(state["document"])
        self._position, self._tokens, self._offset = None, [], 0
        if state["document"] is None:
            return
        found = self._next_document()
        if changed:
            self._offset = min(state["offset"], len(self._tokens))
            return
        if not found or len(self._tokens) < state["offset"]:
            raise ConfigError(
                "model.hf_assets_path",
                f"{len(self._tokens)} tokens in the checkpoint's current document",
                f"at least {state['offset']}: the corpus and tokenizer of the checkpoint",
            )
        self._offset = state["offset"]

    def _next_document(self) -> bool:
        found = self._stream.next_document()
        if found is None:
            return False
        self._position, text = found
        self._tokens = self._tokenizer.encode(text, add_bos=True, add_eos=True)
        self._offset = 0
        return True
