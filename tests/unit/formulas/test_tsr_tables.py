# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from tests.oracle.tsr import (
    TSR_ADAMW_CELLS,
    TSR_CELLS,
    TSR_GALORE_MEMORY,
    TSRShape,
    honest_adamw,
    honest_tsr,
    published_adamw,
    published_galore_memory,
    published_tsr,
)
from torchtitan_lr.models.flavors import FLAVORS

GB = 1e9


def shape(flavor):
    return FLAVORS["full"][flavor]


def printed(value, like):
    return f"{value / GB:.{len(like.partition('.')[2])}f}"


def cells(cost, row):
    return tuple(
        printed(v, t) for v, t in zip((cost.average, cost.peak, cost.memory), row, strict=True)
    )


@pytest.mark.parametrize(("run", "row"), TSR_CELLS.items())
def test_published_tsr_cells(run, row):
    flavor, rank, embedding_rank, interval = run
    cost = published_tsr(shape(flavor), TSRShape(rank, interval, embedding_rank))
    assert cells(cost, row) == row


@pytest.mark.parametrize(("flavor", "row"), TSR_ADAMW_CELLS.items())
def test_published_adamw_cells(flavor, row):
    assert cells(published_adamw(shape(flavor)), row) == row


@pytest.mark.parametrize(("flavor", "cell"), TSR_GALORE_MEMORY.items())
def test_published_galore_memory(flavor, cell):
    rank, text = cell
    assert printed(published_galore_memory(shape(flavor), rank), text) == text


def test_another_rank_misses_the_published_cells():
    row = TSR_CELLS["60M", 256, 64, 100]
    cost = published_tsr(shape("60M"), TSRShape(255 - 30, 100, 64))
    assert cells(cost, row) != row


HONEST = {"60M": (256, 64, 2.6), "130M": (384, 96, 3.2), "350M": (384, 128, 5.6)}
HONEST["1B"] = (512, 256, 10.5)


@pytest.mark.parametrize(("flavor", "row"), HONEST.items())
def test_honest_reduction(flavor, row):
    rank, embedding_rank, factor = row
    tsr = honest_tsr(shape(flavor), TSRShape(rank, 100, embedding_rank))
    assert round(honest_adamw(shape(flavor)).average / tsr.average, 1) == factor


def test_auto_never_costs_more_than_dense_and_head_compression_saves():
    base = {"rank": 384, "embedding_rank": 96}
    costs = {
        name: honest_tsr(shape("130M"), TSRShape(**base, refresh=name))
        for name in ("auto", "sketch", "dense")
    }
    dense = honest_adamw(shape("130M")).peak
    # The control: the sketch of a square matrix at r = d/2 is more than the matrix.
    assert costs["sketch"].peak > dense > costs["auto"].peak
    assert costs["auto"].average <= min(costs["sketch"].average, costs["dense"].average)
    head = honest_tsr(shape("130M"), TSRShape(**base, refresh="auto", compress_head=True))
    assert head.average < costs["auto"].average / 1.5
