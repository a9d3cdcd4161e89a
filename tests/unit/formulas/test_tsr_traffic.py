# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from tests.oracle.tsr import TSRShape, honest_adamw, honest_tsr, linear_sides
from torchtitan_lr.formulas.tsr_traffic import (
    TSRMatrix,
    TSRMesh,
    TSRStep,
    bucket_runs,
    padded_block,
    refresh_is_dense,
    sketch_width,
    tsr_traffic,
)
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

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
    matrices = [TSRMatrix(*side, r, sketch_width(side, r, 5)) for side, r in sides]
    dense = [shape.vocab_size * shape.dim] + [shape.dim] * (2 * shape.n_layers + 1)
    step = TSRStep(1, refresh)
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


def shares_of_dense(changes):
    """Bytes of the first 250 steps at 1B over those of AdamW, by step."""
    shape = FLAVORS["full"]["1B"]
    given = {"rank": 512, "embedding_rank": 256, "compress_head": True, "stagger": True}
    settings = TSRSettings(**{**given, **changes})
    table = (shape.vocab_size, shape.dim)
    sides = {"tok_embeddings.weight": table, "output.weight": table}
    sides |= {f"layers.{i}": side for i, side in enumerate(linear_sides(shape))}
    plans = list(plan_matrices(sides, settings).values())
    matrices = [
        TSRMatrix(p.rows, p.columns, p.rank, p.width, power_iterations=p.power_iterations)
        for p in plans
    ]
    vectors, dense = [shape.dim] * (2 * shape.n_layers + 1), honest_adamw(shape).average / 4
    done, shares = [0] * len(plans), []
    for t in range(250):
        due = [i for i, plan in enumerate(plans) if plan.is_due(t, done[i])]
        for i in due:
            done[i] += 1
        rows = tsr_traffic(matrices, due, vectors, REPLICAS, TSRStep())
        sent = sum(elements(rows, role) for role in ("core", "gradient", "sketch"))
        shares.append(sent / dense)
    assert min(done) >= 2
    return shares


def test_no_step_sends_much_at_1b():
    random = {"start": "random", "vocabulary_power_iterations": 0}
    shares = shares_of_dense(random)
    assert min(shares) > 0.03 and max(shares) <= 0.05
    # The controls: one thing less, and a step sends more.
    first, *others = shares_of_dense(random | {"start": "gradient"})
    assert first > 0.7 and max(others) <= 0.05
    assert max(shares_of_dense({"start": "random"})) > 0.058


def test_a_plain_step_is_one_call_for_cores_and_one_for_dense():
    matrices = [TSRMatrix(8, 6, 2, 3), TSRMatrix(10, 6, 2, 3)]
    rows = tsr_traffic(matrices, (), [6, 5], REPLICAS, TSRStep())
    assert {(r.role, r.calls, r.elements) for r in rows} == {("core", 1, 8), ("gradient", 1, 11)}
    split = tsr_traffic(matrices, (), [6, 5], REPLICAS, TSRStep(buckets=2))
    assert {(r.role, r.calls, r.elements) for r in split} == {("core", 2, 8), ("gradient", 2, 11)}


def test_shards_sum_cores_too():
    mesh = TSRMesh({"fsdp": 2, "tp": 2}, replicas=2)
    matrices = [
        TSRMatrix(8, 6, 2, 3, ("fsdp", "tp")),
        TSRMatrix(8, 6, 2, 3, ("fsdp",), ("tp",), two_sided=False),
    ]
    rows = tsr_traffic(matrices, (), [], mesh, TSRStep())
    # The one-sided core (2, 6) stays split along its columns.
    assert elements(rows, "core", "fsdp") == 4 + 6
    assert elements(rows, "core", "tp") == 4
    assert elements(rows, "core") == 4 + 6
    assert {r.mesh_dim for r in rows if r.role == "norm"} == {"fsdp", "tp"}


def test_auto_takes_the_cheaper():
    step = TSRStep(power_iterations=1, refresh="auto")
    assert refresh_is_dense(16, 16, 8, step) and not refresh_is_dense(16, 16, 3, step)
    assert not refresh_is_dense(16, 16, 8, TSRStep(refresh="sketch"))


def test_buckets_and_blocks():
    assert bucket_runs([3, 3, 3, 9, 1], 6) == [[0, 1], [2], [3], [4]]
    assert bucket_runs([], 6) == []
    assert [padded_block(10, ranks) for ranks in ((), (4,), (2, 4))] == [10, 3, 2]
