# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model beside what one GPU took: each row of docs/data within 15%, or with a reason."""

import json

import pytest

from scripts.bench import modelled
from tests.support.nightly import nightly

REPORTS = {
    card: json.loads((modelled.ROOT / f"docs/data/{card}.json").read_text())["parts"]
    for card in ("h100", "h200")
}
PARTS = [
    f"{card} {part}"
    for card, parts in REPORTS.items()
    for part in parts
    if part not in modelled.NOT_MODELLED
]
OFTEN = ["h100 start", "h100 optimizer", "h200 graphs", "h200 spectral"]


@pytest.mark.parametrize("part", [*OFTEN, *nightly(*(part for part in PARTS if part not in OFTEN))])
def test_rows_of_a_part(part):
    card, _, name = part.partition(" ")
    rows = list(modelled.table_of(card, name, REPORTS[card][name]))
    assert rows
    for row in rows:
        far = abs(row.ratio - 1) > modelled.BOUND
        assert far == ((row.part, row.name) in modelled.REASONS), (row, row.ratio)


def test_every_part_is_modelled_or_has_a_reason():
    assert set(modelled.NOT_MODELLED) < {part for parts in REPORTS.values() for part in parts}
    assert {part for part, _ in modelled.REASONS} < set(PARTS)
