# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Rows of predicted traffic; elements are counted like in the ledger."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

Pass = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one part of the model, in one micro-batch."""

    # ``block i``, ``embedding``, ``head`` (with the loss), ``step``, ``optimizer``, ``outer``
    scope: str
    pass_: Pass
    op: str  # ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``
    # The kind of tensor, which determines the dtype: ``activation`` (or its gradient), at least
    # fp32 ``statistic`` and ``loss``, ``parameter``, ``gradient``, a codec's ``index``; TSR-Adam's
    # ``core``, ``sketch``, ``basis`` and ``checksum``; a spectral optimizer's ``gram`` and
    # ``momentum``; an exchange's ``outer``
    role: str
    calls: int
    elements: int  # elements of all calls together
    mesh_dim: str = "tp"


def of_pass(
    pass_: Pass,
    op: str,
    payloads: Sequence[int],
    role: str = "activation",
    scope: str = "block",
    mesh_dim: str = "tp",
) -> Traffic:
    """Return the row of one collective per payload, of so many elements each."""
    return Traffic(scope, pass_, op, role, len(payloads), sum(payloads), mesh_dim)


forward, backward = partial(of_pass, "forward"), partial(of_pass, "backward")


def merge(rows: Iterable[Traffic]) -> list[Traffic]:
    """Add up rows that differ only in calls and elements."""
    sums: dict[tuple[str, Pass, str, str, str], tuple[int, int]] = {}
    for row in rows:
        kind = row.scope, row.pass_, row.op, row.role, row.mesh_dim
        calls, elements = sums.get(kind, (0, 0))
        sums[kind] = calls + row.calls, elements + row.elements
    return [Traffic(*kind[:4], *numbers, kind[4]) for kind, numbers in sums.items()]


def mean_of(rows: Iterable[Traffic], steps: int) -> list[Traffic]:
    """Return the rows of several steps together as those of an average one, rounded."""
    return [
        replace(row, calls=round(row.calls / steps), elements=round(row.elements / steps))
        for row in merge(rows)
    ]


def element_size(row: Traffic, dtypes: Mapping[str, str]) -> int:
    """Return the bytes per element of a row, by its role and `Run.wire_dtypes`."""
    role = row.role
    if row.pass_ == "optimizer" and row.mesh_dim == "dp_replicate":
        own = {"gradient": "stored", "core": "replicas", "sketch": "replicas"}
        role = own.get(role, role)
    dtype: torch.dtype = getattr(torch, dtypes[role])
    return dtype.itemsize


def sent_bytes(rows: Iterable[Traffic], dtypes: Mapping[str, str]) -> int:
    """Return the bytes of rows together."""
    return sum(row.elements * element_size(row, dtypes) for row in rows)
