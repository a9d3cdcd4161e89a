# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The interface of a gradient codec, and its exchange on real ranks or inside one process.

Reducing W rows takes four phases, each without a host synchronisation:

1. `Codec.encode`: this rank's rows become tensors to be swapped and tensors to be summed;
2. `exchange`: the collectives;
3. `Codec.decode`: the owner's sum, and which blocks of it failed (None where nothing can);
4. `Codec.unsent`, after `gather` told everyone the verdicts: what this rank still owes.

A row's sum plus what all ranks still owe on it is the sum of their inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.compat.collectives import all_gather, reduce_scatter
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.config.methods import GRAD_CODECS


@dataclass
class Message:
    """What one rank sends in one exchange.

    Args:
        swapped: Tensors (W, a): row i goes to rank i as it is (all-to-all).
        summed: Tensors (W, a): row i is summed over ranks at rank i (reduce-scatter).
        positions: Kept entries (W, k) of every row, None where all are sent.
        values: Their values (W, k).
    """

    swapped: dict[str, Tensor] = field(default_factory=dict)
    summed: dict[str, Tensor] = field(default_factory=dict)
    positions: Tensor | None = None
    values: Tensor | None = None


@dataclass
class Decoded:
    """What an owner made of a message.

    Args:
        total: Sum over ranks of what was sent (m,); zero in failed blocks.
        verdict: Packed bits (v,), one a block of consecutive entries that failed; None where
            the codec cannot fail.
        counts: Numbers for the metrics, scalar tensors by name.
    """

    total: Tensor
    verdict: Tensor | None = None
    counts: dict[str, Tensor] = field(default_factory=dict)


class Codec(ABC):
    """Turns W rows into messages and received messages into sums; a subclass is a codec.

    Attributes:
        name: The value of ``grad_compression.codec``.
        lossy: Whether anything can be left unsent. The state of a codec that is lossy is a residual
            (W, m) per unit; the others have none.
        size_limit: What a unit may be too small for, such as "a sketch to peel"; empty where units
            of every size can be decoded.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = True
    size_limit: ClassVar[str] = ""

    @classmethod
    def resolve(cls, section: Any, c: float, theta: float, ranks: int) -> CodecSizes:
        """Return the codec's numbers for a run.

        Args:
            section: ``[grad_compression]``; ranges are checked elsewhere.
            c: Compression of the level.
            theta: Sparsity of the level.
            ranks: Ranks that exchange gradients.

        Raises:
            ConfigError: The codec cannot work with these settings.
        """
        return CodecSizes(cls.name, c, theta)

    @classmethod
    @abstractmethod
    def build(cls, sizes: CodecSizes, ranks: int) -> Codec:
        """Build the codec.

        Args:
            sizes: Its numbers.
            ranks: Ranks W.
        """

    @abstractmethod
    def message_bytes(self, m: int) -> dict[str, int]:
        """Return the bytes that a rank hands to the collectives for one destination, by part.

        Args:
            m: Compressed entries of the destination, at least one.
        """

    @abstractmethod
    def bits(self) -> dict[str, float]:
        """Return `message_bytes` in bits per entry, by part, in the limit of large tensors."""

    def decodes(self, m: int) -> bool:
        """Return whether a destination of m entries can be decoded."""
        return True

    def describe_size(self, m: int) -> str:
        """Say in a few words why a destination of m entries is below `size_limit`."""
        return ""

    def describe(self) -> str:
        """Return the codec's name and what it was set to, for the log."""
        return self.name

    def describe_theta(self) -> str:
        """Say what a θ that `resolve` raised is the least for."""
        return ""

    @abstractmethod
    def encode(self, rows: Tensor, seed: int) -> Message:
        """Choose what to send.

        Args:
            rows: Gradient plus residual of this rank (W, m), row i for owner i.
            seed: Of this step, equal on all ranks.
        """

    @abstractmethod
    def decode(self, received: Mapping[str, Tensor], m: int, seed: int) -> Decoded:
        """Sum what was received.

        Args:
            received: Swapped tensors (W, a), row i from rank i, and summed ones (a,), by name.
            m: Entries of a row.
            seed: As in `encode`.
        """

    @abstractmethod
    def unsent(self, rows: Tensor, message: Message, verdicts: Tensor | None) -> Tensor:
        """Return what this rank still owes (W, m): all it did not send, and what failed.

        Args:
            rows: As in `encode`; may be overwritten.
            message: What `encode` made of them.
            verdicts: The owners' verdicts (W, v).
        """


CODECS: dict[str, type[Codec]] = {}
"""Codecs by name; `registry` registers those of this package."""


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Make a codec known under its name, also as a value of ``grad_compression.codec``.

    Args:
        codec: The codec; `formulas.compression` states its traffic by the same name.
    """
    CODECS[codec.name] = codec
    if codec.name not in GRAD_CODECS:
        GRAD_CODECS.append(codec.name)
    return codec


def exchange(message: Message, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Run a message's collectives: an all-to-all a tensor, one reduce-scatter a dtype.

    Args:
        message: This rank's.
        group: The W ranks.

    Returns:
        Received tensors by name, see `Codec.decode`.
    """
    received = {}
    for name, tensor in message.swapped.items():
        received[name] = torch.empty_like(tensor)
        dist.all_to_all_single(received[name], tensor, group=group)
    for names in _by_dtype(message.summed):
        parts = [message.summed[name] for name in names]
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        own = whole.new_empty(whole.shape[1])
        reduce_scatter(own, whole.flatten(), group=group)
        sizes = [part.shape[1] for part in parts]
        received |= dict(zip(names, own.split(sizes), strict=True))
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's tensor (a,) as rows (W, a)."""
    rows = tensor.new_empty(group.size() * tensor.numel())
    all_gather(rows, tensor.contiguous(), group=group)
    return rows.view(group.size(), -1)


def exchange_in_process(messages: Sequence[Message]) -> list[dict[str, Tensor]]:
    """Do for messages of W ranks held by one process what `exchange` does on W ranks."""
    first = messages[0]
    received: list[dict[str, Tensor]] = []
    for owner in range(len(messages)):
        swapped = {n: torch.stack([x.swapped[n][owner] for x in messages]) for n in first.swapped}
        summed = {n: _sum([x.summed[n][owner] for x in messages]) for n in first.summed}
        received.append(swapped | summed)
    return received


def reduce_in_process(
    codec: Codec, rows: Tensor, seed: int
) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Reduce the rows of W ranks inside one process, phase by phase as real ranks do.

    Args:
        codec: The codec.
        rows: (W, W, m): rank, owner, entry.
        seed: Of this step.

    Returns:
        Sums by owner (W, m), what every rank still owes (W, W, m), every owner's counts.
    """
    messages = [codec.encode(own.clone(), seed) for own in rows]
    decoded = [codec.decode(x, rows.shape[-1], seed) for x in exchange_in_process(messages)]
    verdicts = [x.verdict for x in decoded if x.verdict is not None]
    told = torch.stack(verdicts) if verdicts else None
    owed = [codec.unsent(o.clone(), x, told) for o, x in zip(rows, messages, strict=True)]
    totals = torch.stack([x.total for x in decoded])
    return totals, torch.stack(owed), [x.counts for x in decoded]


def _by_dtype(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    names: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(tensor.dtype, []).append(name)
    return list(names.values())


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part  # keeps uint8, as the collective does; Tensor.sum would widen it
    return total
