# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from tests.oracle.tsr import TSRShape, honest_tsr, linear_sides
from torchtitan_lr.formulas.tsr_traffic import (
    TSRMatrix,
    TSRMesh,
    TSRStep,
    bucket_runs,
    tsr_traffic,
)
from torchtitan_lr.models.flavors import FLAVORS

REPLICAS = TSRMesh({}, replicas=8)


def elements(rows, role, dim="dp_replicate"):
    return sum(row.elements for row in rows if row.role == role and row.mesh_dim == dim)


@pytest.mark.parametrize("refresh", ["sketch", "dense", "auto"])
def test_adds_up_to_the_honest_counting(refresh):
    """The paper's counting in bytes a run, against calls of collectives in two kinds of steps."""
    shape, interval = FLAVORS["full"]["60M"], 100
    tsr = TSRShape(256, interval, 64, embedding_interval=interval, refresh=refresh)
    sides = [(side, 256) for side in linear_sides(shape)]
    sides.append(((shape.vocab_size, shape.dim), 64))
    matrices = [TSRMatrix(*side, r, min(r + 5, *side)) for side, r in sides]
    dense = [shape.vocab_size * shape.dim] + [shape.dim] * (2 * shape.n_layers + 1)
    step = TSRStep(refresh)
    fresh = tsr_traffic(matrices, range(len(matrices)), dense, REPLICAS, step)
    plain = tsr_traffic(matrices, (), dense, REPLICAS, step)
    counted = [
        sum(elements(rows, role) for role in ("core", "gradient", "sketch"))
        for rows in (fresh, plain)
    ]
    cost = honest_tsr(shape, tsr)
    assert 4 * counted[0] == cost.peak
    average = 4 * (counted[0] + (interval - 1) * counted[1]) / interval
    assert average == pytest.approx(cost.average, rel=1e-12)


def test_buckets_and_blocks():
    assert bucket_runs([3, 3, 3, 9, 1], 6) == [[0, 1], [2], [3], [4]]
    assert bucket_runs([], 6) == []
    mesh = TSRMesh({"fsdp": 2, "tp": 4})
    splits = [((), ()), (("tp",), ()), (("fsdp", "tp"), ("fsdp",))]
    blocks = [mesh.block(TSRMatrix(10, 9, 1, 1, *split)) for split in splits]
    assert blocks == [(10, 9), (3, 9), (2, 5)]
