# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from tests.oracle.tsr import TSRShape, gathered_elements, honest_tsr, linear_sides
from torchtitan_lr.costs.tsr_messages import TSRMatrix, TSRMesh, tsr_traffic
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.optim.base import split_buckets
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

REPLICAS = TSRMesh({}, replicas=8)


def elements(rows, role, dim="dp_replicate"):
    return sum(row.elements for row in rows if row.role == role and row.mesh_dim == dim)


@pytest.mark.parametrize("refresh", ["sketch", "dense", "auto"])
def test_adds_up_to_the_honest_counting(refresh):
    """The paper's counting in bytes a run, against calls of collectives in two kinds of steps."""
    shape, interval = FLAVORS["full"]["60M"], 100
    tsr = TSRShape(256, 64, interval, refresh=refresh)
    shapes = {str(i): side for i, side in enumerate(linear_sides(shape))}
    shapes["tok_embeddings.weight"] = (shape.vocab_size, shape.dim)
    settings = TSRSettings(256, embedding_rank=64, refresh=refresh, overlap_buckets=1)
    matrices = [TSRMatrix(plan) for plan in plan_matrices(shapes, settings).values()]
    dense = [shape.vocab_size * shape.dim] + [shape.dim] * (2 * shape.n_layers + 1)
    fresh = tsr_traffic(matrices, range(len(matrices)), dense, REPLICAS, settings)
    plain = tsr_traffic(matrices, (), dense, REPLICAS, settings)
    counted = [
        sum(elements(rows, role) for role in ("core", "gradient", "sketch"))
        for rows in (fresh, plain)
    ]
    expected, peak = honest_tsr(shape, tsr)
    assert 4 * counted[0] == peak
    average = 4 * (counted[0] + (interval - 1) * counted[1]) / interval
    assert average == pytest.approx(expected, rel=1e-12)


def test_buckets_and_blocks():
    assert split_buckets("abcde", [3, 3, 3, 9, 1], 6) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert split_buckets([], [], 6) == []
    mesh = TSRMesh({"fsdp": 2, "tp": 4})
    plan = plan_matrices({"w": (10, 9)}, TSRSettings(rank=1))["w"]
    splits = [((), ()), (("tp",), ()), (("fsdp", "tp"), ("fsdp",))]
    blocks = [mesh.block(TSRMatrix(plan, *split)) for split in splits]
    assert blocks == [(10, 9), (3, 9), (2, 5)]


@pytest.mark.parametrize("ranks", [8, 31, 32, 1024])
def test_a_refresh_gathers_rows_or_triangles(ranks):
    """16,384 rows are less than 32 triangles of 517 rows, and more than 31."""
    settings = TSRSettings(rank=512, refresh="sketch", power_iterations=0)
    plan = plan_matrices({"w": (16384, 4096)}, settings)["w"]
    mesh = TSRMesh({"fsdp": ranks})
    traffic = tsr_traffic([TSRMatrix(plan, ("fsdp",))], [0], [], mesh, settings)
    (gather,) = [row for row in traffic if row.op == "all_gather"]
    assert (gather.calls, gather.elements) == (1, gathered_elements(16384, 517, ranks))
    assert (gather.elements == ranks * 517**2) == (ranks < 32)
