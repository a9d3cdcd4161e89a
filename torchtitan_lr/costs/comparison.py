# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Comparison of the ledger's measurements with the formulas."""

from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.ledger.ledger import COUNTS, reading_order
from torchtitan_lr.ledger.scopes import STEP

IDENTITY = ("scope", "pass", "op", "mesh_dim", "dtype")  # the keys that identify a row


def compare(
    rows: Iterable[Mapping[str, Any]], expected: Iterable[Traffic], dtypes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Put measured rows and formulas side by side.

    Rows get ``expected_calls`` and ``expected_elements``: 0 where no formula predicts the calls,
    None in `STEP`, which has none. Calls that were predicted only have rows of 0.
    """
    found = {tuple(row[key] for key in IDENTITY): dict(row) for row in rows}
    wanted: dict[tuple[Any, ...], list[int]] = {}
    for item in expected:
        identity = (item.scope, item.pass_, item.op, item.mesh_dim, dtypes[item.role])
        numbers = wanted.setdefault(identity, [0, 0])
        numbers[0] += item.calls
        numbers[1] += item.elements
    table = []
    for identity in found.keys() | wanted.keys():
        nothing = dict(zip(IDENTITY, identity, strict=True))
        row = found.get(identity, nothing | dict.fromkeys(COUNTS, 0))
        calls, elements = (None, None) if identity[0] == STEP else wanted.get(identity, [0, 0])
        table.append(row | {"expected_calls": calls, "expected_elements": elements})
    return sorted(table, key=reading_order)


def differences(table: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of a comparison whose measurement differs from the formula."""
    return [
        row
        for row in table
        if row["expected_calls"] is not None
        and (row["calls"], row["elements"]) != (row["expected_calls"], row["expected_elements"])
    ]
