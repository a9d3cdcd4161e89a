# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The formulas of messages against the papers' tables and published numbers, and by hand."""

from typing import Any

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.oracle.tsr import TSRShape, gathered_elements, honest_tsr, linear_sides
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.step_traffic import step_traffic
from torchtitan_lr.costs.tp_messages import FORMULAS
from torchtitan_lr.costs.tsr_messages import TSRMatrix, tsr_traffic
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.optim.own_optimizer import split_buckets
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices
from torchtitan_lr.parallel.plan_parts import TPSettings

BS, D, F, R, D_KV = 24, 64, 160, 16, 32
SIZES: dict[str, Any] = {"dim": D, "n_heads": 4, "ffn_dim": F, "vocab_size": 128}


def block_traffic(shape: LlamaArgs, settings: TPSettings, tokens: int, pass_: str) -> list[Any]:
    rows = FORMULAS[settings.plan](shape, settings, tokens, 2)["block"]
    return [row for row in rows if row.pass_ == pass_]


def btp(**settings: Any) -> TPSettings:
    return TPSettings("btp", **settings)


BSD, BSF, BSR = BS * D, BS * F, BS * R
REPLICATED = "vanilla_replicated"
TABLE = [
    (TPSettings("megatron"), 2, 2 * BSD, 2, 2 * BSD),
    (TPSettings(REPLICATED, grouping=False), 7, 5 * BSD + 2 * BSF, 7, 6 * BSD + BSF),
    (TPSettings(REPLICATED), 7, 5 * BSD + 2 * BSF, 4, 3 * BSD + BSF),
    (TPSettings("vanilla", grouping=False), 8, 6 * BSD + 2 * BSF, 10, 9 * BSD + BSF),
    (TPSettings("vanilla"), 8, 6 * BSD + 2 * BSF, 7, 6 * BSD + BSF),
    (btp(grouping=False, norm="sync"), 9, 7 * BSR + 2 * BS, 9, 7 * BSR + 2 * BS),
    (btp(grouping=False), 9, 7 * BSR + 2 * BS, 7, 7 * BSR),
    (btp(norm="sync"), 6, 7 * BSR + 2 * BS, 6, 7 * BSR + 2 * BS),
    (btp(), 6, 7 * BSR + 2 * BS, 4, 7 * BSR),
]
"""Calls and elements of a block, forward and then backward."""


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].plan}-{row[1]}-{row[3]}")
def test_collectives_of_a_block(row: Any) -> None:
    settings, *numbers = row
    rank = 0 if settings.plan == "megatron" else R
    family = "full" if settings.plan == "megatron" else "cola"
    shape = LlamaArgs(family=family, rank_attention=rank, rank_ffn=rank, **SIZES)
    found = []
    for name in ("forward", "backward"):
        rows = block_traffic(shape, settings, BS, name)
        found += [sum(r.calls for r in rows), sum(r.elements for r in rows)]
    assert found == numbers


@pytest.mark.parametrize(
    ("plan", "gib"), [("megatron", 0.250), ("vanilla_replicated", 1.297), ("btp", 0.219)]
)
def test_published_volumes_of_7b(plan: str, gib: float) -> None:
    """BOOST, Figure 8 (left): 7B, b = 4, s = 4096, bf16, GiB per block and forward pass."""
    family = "full" if plan == "megatron" else "cola"
    rows = block_traffic(FLAVORS[family]["7B"], TPSettings(plan), 4 * 4096, "forward")
    elements = sum(row.elements for row in rows if row.role == "activation")
    assert round(elements * 2 / 2**30, 3) == gib


def paper_run(world: int, *options: str) -> Run:
    config = build_job_config([*options, "--training.global_batch_size=-1"])
    check_job_config(config, world, "cuda", data="paper")
    return read_run(config, world)


TP = "--parallelism.tensor_parallel_degree"


@pytest.mark.parametrize(("name", "tp", "less"), [("cola_7b", 1, 4), ("cola_7b", 2, 2)])
def test_latents_send_d_kv_over_t_r_times_less(name: str, tp: int, less: int) -> None:
    options = [f"--job.config_file={name}", f"{TP}={tp}"]
    found = []
    for gather in ("kv", "latents"):
        ways = ["--parallelism.context_parallel_degree=8", f"--parallelism.cp_gather={gather}"]
        run = paper_run(8 * tp, *options, *ways)
        found.append([row for row in step_traffic(run, 0) if row.mesh_dim == "cp"])
    kv, latents = found
    assert [row.elements for row in kv] == [less * row.elements for row in latents]
    # One gather forward; in backward another one and a reduce-scatter; k and v in one.
    calls = [(row.pass_, row.op, row.calls) for row in kv[:3]]
    assert calls[0] == ("forward", "all_gather", 1)
    assert calls[1:] == [("backward", "all_gather", 1), ("backward", "reduce_scatter", 1)]
    row = run.microbatch * run.seq_len * 2 * 4096 // tp
    assert len(kv) == 3 * run.args.n_layers and kv[0].elements == row


LIMITS = {"Muon": 45, "Spectron": 45, "LoRAMuon": 89}
"""Numbers that a spectral optimizer sums per step at 1B, in millions."""


@pytest.mark.parametrize("mesh", ["fsdp", "tp", "fsdp_tp"])
@pytest.mark.parametrize("rule", LIMITS)
def test_sums_of_gram_matrices(rule: str, mesh: str) -> None:
    """Every A and B is split outside r: one sum of Gram matrices, and as much returns at most."""
    tp = {"fsdp": 1, "tp": 8, "fsdp_tp": 2}[mesh]
    model = ["--model.name=llama_cola", "--model.flavor=1B_boost", f"--optimizer.name={rule}"]
    run = paper_run(8, *model, f"{TP}={tp}")
    found = {(row.op, row.mesh_dim): row.elements for row in run.optimizer.traffic(0)}
    assert found.keys() == {("reduce_scatter", mesh), ("all_gather", mesh)}
    summed = found["reduce_scatter", mesh]
    assert 0.98 * LIMITS[rule] < summed / 1e6 <= LIMITS[rule]
    assert found["all_gather", mesh] <= summed


@pytest.mark.parametrize("refresh", ["sketch", "dense", "auto"])
def test_tsr_adds_up_to_the_honest_counting(refresh: Any) -> None:
    """The paper's counting in bytes a run, against calls of collectives in two kinds of steps."""
    shape, interval = FLAVORS["full"]["60M"], 100
    shapes = {str(i): side for i, side in enumerate(linear_sides(shape))}
    shapes["tok_embeddings.weight"] = (shape.vocab_size, shape.dim)
    settings = TSRSettings(256, embedding_rank=64, refresh=refresh, overlap_buckets=1)
    matrices = [TSRMatrix(plan) for plan in plan_matrices(shapes, settings).values()]
    dense = [shape.vocab_size * shape.dim] + [shape.dim] * (2 * shape.n_layers + 1)
    counted = []
    for refreshing in (range(len(matrices)), ()):
        rows = tsr_traffic(matrices, refreshing, dense, {"dp_replicate": 2}, settings)
        roles = ("core", "gradient", "sketch")
        counted.append(sum(row.elements for row in rows if row.role in roles))
    expected, peak = honest_tsr(shape, TSRShape(256, 64, interval, refresh=refresh))
    assert 4 * counted[0] == peak
    average = 4 * (counted[0] + (interval - 1) * counted[1]) / interval
    assert average == pytest.approx(expected, rel=1e-12)


def test_buckets_and_blocks_of_tsr() -> None:
    assert split_buckets("abcde", [3, 3, 3, 9, 1], 6) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert split_buckets([], [], 6) == []
    plan = plan_matrices({"w": (10, 9)}, TSRSettings(rank=1))["w"]
    splits: list[Any] = [({}, {}), ({"tp": 4}, {}), ({"fsdp": 2, "tp": 4}, {"fsdp": 2})]
    blocks = [TSRMatrix(plan, *split).block for split in splits]
    assert blocks == [(10, 9), (3, 9), (2, 5)]


def test_ranks_that_share_decompositions_send_bases() -> None:
    """Seven matrices of k = 3 over FSDP; then four of them, or all seven, over the replicas."""
    plans = plan_matrices({str(i): (9, 8) for i in range(7)}, TSRSettings(rank=2, oversampling=1))

    def bases(split: dict[str, int], shares: bool) -> dict[str, int]:
        settings = TSRSettings(rank=2, oversampling=1, share_refresh=shares)
        matrices = [TSRMatrix(plan, split) for plan in plans.values()]
        rows = tsr_traffic(matrices, range(7), [], {"dp_replicate": 3}, settings)
        return {row.mesh_dim: row.elements for row in rows if row.role == "basis"}

    assert bases({}, False) == {}
    assert bases({"fsdp": 2}, False) == {"fsdp": 7 * 3 * 7}
    assert bases({"fsdp": 2}, True) == {"fsdp": 7 * 3 * 7, "dp_replicate": 4 * 3 * 7}
    assert bases({"fsdp": 8}, True) == {"fsdp": 7 * 3 * 7}


@pytest.mark.parametrize("ranks", [8, 31, 32, 1024])
def test_a_refresh_gathers_rows_or_triangles(ranks: int) -> None:
    """16,384 rows are less than 32 triangles of 517 rows, and more than 31."""
    settings = TSRSettings(rank=512, refresh="sketch", power_iterations=0)
    plan = plan_matrices({"w": (16384, 4096)}, settings)["w"]
    traffic = tsr_traffic([TSRMatrix(plan, {"fsdp": ranks})], [0], [], {}, settings)
    (gather,) = [row for row in traffic if row.op == "all_gather"]
    assert (gather.calls, gather.elements) == (1, gathered_elements(16384, 517, ranks))
    assert (gather.elements == ranks * 517**2) == (ranks < 32)
