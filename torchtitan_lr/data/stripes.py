# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Stripes: each row of the global batch reads its own stream, on whichever rank it is computed.

A loader that splits the corpus over *ranks* yields different batches when the number of ranks
changes. This one splits it over the rows of the **global** batch. Row ``j`` (of ``B``) reads a
*stripe*: an endless stream over the blocks ``j, j + B, j + 2B, ...`` of the corpus. Its documents
are tokenised, concatenated and cut into windows of ``seq_len + 1`` tokens exactly as in
torchtitan's ``HuggingFaceTextDataset`` (input ``x[:-1]``, labels ``x[1:]``; windows do not
overlap). This is the fixed order; an :class:`Order` permutes the blocks, and
:mod:`torchtitan_lr.data.shuffle` the windows. The content of row ``j`` does not depend on the rank
or the micro-batch that computes it. Therefore:

* the batches are the same for any data-parallel size and any split between ranks and gradient
  accumulation, as long as ``B`` is unchanged;
* a rank tokenises only its own rows, so no work is repeated.

A stripe's position is three integers: block counter, document in the block, token offset in the
document. No token buffer is stored: on resume the stripe tokenises the current document again and
drops ``offset`` tokens. Sample ``n = step * B + j`` of the run is the ``step``-th window of stripe
``j``, so the number of consumed samples is the position of the whole run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.encoding import NO_TOKENS, Tokens, encode_documents
from torchtitan_lr.data.order import Order
from torchtitan_lr.data.token_cache import BlockRecorder
from torchtitan_lr.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan_lr.data.blocks import BlockCorpus
    from torchtitan_lr.titan.base import BaseTokenizer


CHARACTERS_PER_TOKEN = 4
"""Assumed when documents are read ahead; fewer make :func:`fill` read another round."""


class DocumentStream(Protocol):
    """A resumable sequence of documents."""

    def next_document(
        self, unreadable: Callable[[DataError], None] | None = None
    ) -> tuple[Any, str | Tokens] | None:
        """Return ``(position, document)`` of the next document, or None at the end.

        ``position`` is a JSON value; :meth:`seek` with it makes this document the next one. The
        document is a text, or its tokens where they are known.

        Args:
            unreadable: Receives the unreadable records before the document; :meth:`skip` by
                default.
        """
        ...

    def seek(self, position: Any) -> None:
        """Make the document at ``position`` the next one; None is the start of the stream."""
        ...

    def skip(self, error: DataError) -> None:
        """Count an unreadable record as skipped, or raise its error."""
        ...

    def encoded(self, position: Any, tokens: Tokens) -> None:
        """Receive the tokens of a text that :meth:`next_document` returned, in the same order."""
        ...


def stripe_block(stripe: int, num_stripes: int, num_blocks: int, k: int) -> int:
    """Return the index of the ``k``-th block that a stripe reads.

    The plain rule ``(stripe + k * num_stripes) mod num_blocks`` would keep a stripe on the same few
    blocks forever if the two numbers share a factor. Therefore every stripe moves on by one block
    after each full turn through them. Over its first ``num_blocks`` blocks a stripe reads each
    block of the corpus exactly once, and at any time the stripes together cover the corpus evenly.

    Args:
        stripe: The stripe, ``0 <= stripe < num_stripes``.
        num_stripes: Number of stripes that share the corpus.
        num_blocks: Number of blocks in the corpus.
        k: Number of blocks that the stripe has read before.
    """
    turn = num_blocks // gcd(num_blocks, num_stripes)
    return (stripe + k * num_stripes + k // turn) % num_blocks


class BlockStream:
    """The documents of one stripe of a :class:`BlockCorpus`.

    Positions are ``[k, d]``: document ``d`` of the stripe's ``k``-th block.

    Args:
        corpus: The corpus.
        stripe: Index of this stripe.
        num_stripes: Number of stripes that share the corpus.
        infinite: Whether to start over at the end; otherwise the stripe ends after one pass.
        order: The order of the blocks; None for the fixed one (:func:`stripe_block`).
    """

    def __init__(
        self,
        corpus: BlockCorpus,
        stripe: int,
        num_stripes: int,
        infinite: bool,
        order: Order | None = None,
    ) -> None:
        self._corpus = corpus
        self._block_of = stripe_block if order is None else order.block
        self._stripe = stripe
        self._num_stripes = num_stripes
        self._infinite = infinite
        self.seek(None)

    def seek(self, position: Any) -> None:
        """Make document ``d`` of the ``k``-th block the next one, ``position = [k, d]``."""
        self._k, skip = (0, 0) if position is None else (int(position[0]), int(position[1]))
        self._d = 0
        self._recorders: dict[int, BlockRecorder] = {}
        self._documents = self._open(self._k)
        if skip:
            self._recorders.clear()  # the block's first documents will be missing
        for _ in range(skip):  # unreadable records count, skipped or not
            if next(self._documents, None) is None:
                break
            self._d += 1

    def next_document(
        self, unreadable: Callable[[DataError], None] | None = None
    ) -> tuple[Any, str | Tokens] | None:
        """Return the next document and its ``[k, d]``, or None after the last one."""
        while True:
            for _ in range(self._corpus.num_blocks + 1):
                for document in self._documents:
                    self._d += 1
                    if not isinstance(document, DataError):
                        return [self._k, self._d - 1], document
                    (unreadable or self.skip)(document)
                last = self._stripe + (self._k + 1) * self._num_stripes >= self._corpus.num_blocks
                if last and not self._infinite:
                    return None
                self._k, self._d = self._k + 1, 0
                self._documents = self._open(self._k)
            # In the fixed order these were all blocks; a shuffled stripe may have missed some.
            if not self._has_text():
                want = "a corpus with some text in it"
                raise ConfigError(self._corpus.key, self._corpus.name, want)

    def _has_text(self) -> bool:
        blocks = map(self._corpus.documents, range(self._corpus.num_blocks))
        return any(isinstance(found, str) for block in blocks for found in block)

    def skip(self, error: DataError) -> None:
        """Count an unreadable record as skipped (:meth:`BlockCorpus.skip`)."""
        self._corpus.skip(error)

    def encoded(self, position: Any, tokens: Tokens) -> None:
        """Keep a document's tokens for the cache, which is written once its block is complete."""
        recorder = self._recorders.get(position[0])
        if recorder is not None and recorder.add(tokens):
            del self._recorders[position[0]]

    def _recorded(self, k: int, block: int) -> Iterator[str | DataError]:
        """Yield a block's documents; its recorder is finished before the last is returned.

        Otherwise a block of one long document would not be written until the stripe is past it.
        """
        documents = self._corpus.documents(block)
        count, document = 0, next(documents, None)
        while document is not None:
            following = next(documents, None)
            count += 1
            if isinstance(document, DataError):
                self._recorders.pop(k, None)  # a repaired record must be read again
            if following is None and (recorder := self._recorders.get(k)) is not None:
                recorder.finish(count)
            yield document
            document = following

    def _open(self, k: int) -> Iterator[str | Tokens | DataError]:
        if not self._infinite and self._stripe + k * self._num_stripes >= self._corpus.num_blocks:
            return iter(())
        block = self._block_of(self._stripe, self._num_stripes, self._corpus.num_blocks, k)
        cache = self._corpus.cache
        stamp = None if cache is None else self._corpus.stamp(block)
        if cache is None or stamp is None:
            return self._corpus.documents(block)
        known = cache.read(block, stamp)
        if known is not None:
            return iter(known)
        self._recorders[k] = BlockRecorder(cache, block, stamp)
        return self._recorded(k, block)


@dataclass
class _Document:
    """A document that a stripe has read, with the unreadable records before it."""

    position: Any
    text: str
    tokens: Tokens | None
    errors: list[DataError]


class Stripe:
    """One stream of windows, cut from tokenised and concatenated documents.

    :func:`fill` reads documents ahead of the position; :meth:`take` moves the position. Unreadable
    records are counted, and errors raised, when the position reaches them.

    Args:
        stream: The stripe's documents.
        tokenizer: Encodes the documents; begin and end tokens are added.
        seq_len: Tokens of an input; a window has one more.
    """

    def __init__(self, stream: DocumentStream, tokenizer: BaseTokenizer, seq_len: int) -> None:
        self._stream = stream
        self.tokenizer = tokenizer
        self._window = seq_len + 1
        self._forget()

    def _forget(self) -> None:
        self._position: Any = None
        self._tokens: Tokens = NO_TOKENS
        self._offset = 0
        # What was read ahead: documents, errors behind the last one, and the end of the stream.
        self._ahead: deque[_Document] = deque()
        self._errors: list[DataError] = []
        self._ended = False
        self._failure: ConfigError | None = None

    def demands(self, windows: int) -> list[tuple[Stripe, int]]:
        """Return the stripes that must hold some windows: itself."""
        return [(self, windows)]

    def missing(self, windows: int) -> int:
        """Return how many tokens must still be read for some windows; 0 at the stream's end."""
        if self._ended:
            return 0
        held = len(self._tokens) - self._offset
        held += sum(len(found.tokens) for found in self._ahead if found.tokens is not None)
        return max(0, windows * self._window - held)

    def pull(self, tokens: int) -> list[_Document]:
        """Read about as many tokens as are missing; return the documents without tokens."""
        new: list[_Document] = []
        while tokens > 0 and not self._ended:
            try:
                found = self._stream.next_document(self._errors.append)
            except ConfigError as error:
                self._failure, found = error, None
            if found is None:
                self._ended = True
                break
            position, document = found
            errors, self._errors = self._errors, []
            if isinstance(document, str):
                new.append(_Document(position, document, None, errors))
                self._ahead.append(new[-1])
                tokens -= 1 + len(document) // CHARACTERS_PER_TOKEN
            else:
                self._ahead.append(_Document(position, "", document, errors))
                tokens -= len(document)
        return new

    def put(self, document: _Document, tokens: Tokens) -> None:
        """Set the tokens of a document that :meth:`pull` returned."""
        document.text, document.tokens = "", tokens
        self._stream.encoded(document.position, tokens)

    def take(self, windows: int) -> npt.NDArray[np.int64] | None:
        """Return the next windows, ``(windows, seq_len + 1)``, after :func:`fill`.

        Returns:
            The tokens; None if the stream has ended before.

        Raises:
            ConfigError: The stream cannot be read, or too many of its records.
        """
        out = np.empty(windows * self._window, dtype=np.int64)
        done = 0
        while done < len(out):
            if self._offset >= len(self._tokens) and not self._advance():
                return None
            part = self._tokens[self._offset : self._offset + len(out) - done]
            out[done : done + len(part)] = part
            self._offset += len(part)
            done += len(part)
        return out.reshape(windows, self._window)

    def next_window(self) -> list[int] | None:
        """Return the next ``seq_len + 1`` tokens, or None when the stream has ended."""
        fill([(self, 1)])
        window = self.take(1)
        return None if window is None else window[0].tolist()

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
        self._forget()
        if state["document"] is None:
            return
        _encode([self], [1])
        found = self._advance()
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

    def _advance(self) -> bool:
        """Move to the next document; return False at the end of the stream."""
        found = self._ahead.popleft() if self._ahead else None
        for error in self._errors if found is None else found.errors:
            self._stream.skip(error)
        if found is None:
            self._errors = []
            if self._failure is not None:
                raise self._failure
            return False
        assert found.tokens is not None
        self._position, self._tokens, self._offset = found.position, found.tokens, 0
        return True


def fill(demands: Sequence[tuple[Stripe, int]]) -> None:
    """Read and tokenise documents until each stripe holds its windows, or its stream has ended.

    The documents of all stripes are encoded together, so that the tokenizer can use all cores.
    """
    while any(missing := [stripe.missing(windows) for stripe, windows in demands]):
        _encode([stripe for stripe, _ in demands], missing)


def _encode(stripes: Sequence[Stripe], missing: Sequence[int]) -> None:
    new = [
        (stripe, document)
        for stripe, tokens in zip(stripes, missing, strict=True)
        for document in stripe.pull(tokens)
    ]
    if not new:
        return
    texts = [document.text for _, document in new]
    for (stripe, document), tokens in zip(
        new, encode_documents(stripes[0].tokenizer, texts), strict=True
    ):
        stripe.put(document, tokens)
