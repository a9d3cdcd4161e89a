# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers that a spectral optimizer sends: limits at 1B by formula, and by the code itself."""

from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch

import torchtitan_lr.training.register  # noqa: F401
from tests.support.nightly import nightly
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.compat.fake import FakeTensorMode, fake_process_group
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.step_traffic import step_traffic
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.optim.entries import build_optimizers
from torchtitan_lr.parallel.parallelize import parallelize_llama
from torchtitan_lr.titan.base import ParallelDims
from torchtitan_lr.titan.device import bind_device

MILLION = 1e6
LIMITS = {"Muon": 45, "Spectron": 45, "LoRAMuon": 89}
"""Numbers summed per step at 1B, in millions."""
MESHES = {"fsdp": (8, 1), "tp": (1, 8), "fsdp_tp": (4, 2)}


def paper_run(flavor: str, rule: str, shard: int, tp: int, *options: str) -> Run:
    config = build_job_config(
        [
            "--model.name=llama_cola",
            f"--model.flavor={flavor}",
            f"--optimizer.name={rule}",
            f"--parallelism.tensor_parallel_degree={tp}",
            *options,
        ]
    )
    check_job_config(config, shard * tp, "cuda", on_paper=True)
    return read_run(config, shard * tp)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rule", LIMITS)
def test_limits(rule: str, mesh: str) -> None:
    """Every A and B is split outside r: one sum of Gram matrices, whatever the layout.

    What returns is at most as much, so that both together are at most the bytes of an all-reduce.
    """
    run = paper_run("1B_boost", rule, *MESHES[mesh])
    found = {(row.op, row.mesh_dim): row.elements for row in step_traffic_of_optimizer(run)}
    assert found.keys() == {("reduce_scatter", mesh), ("all_gather", mesh)}
    summed = found["reduce_scatter", mesh]
    assert 0.98 * LIMITS[rule] < summed / MILLION <= LIMITS[rule]
    assert found["all_gather", mesh] <= summed


USUAL = ("LoRAMuon", "fsdp_tp")
OTHERS = [case for case in product(LIMITS, MESHES) if case != USUAL]


@pytest.mark.parametrize(("rule", "mesh"), [USUAL, *nightly(*OTHERS)])
def test_the_code_sends_what_the_formula_says(rule: str, mesh: str) -> None:
    """The whole 1B, parallelized as in training, steps on tensors without data."""
    run = paper_run("1B_boost", rule, *MESHES[mesh])
    rows = take_step(run, FakeTensorMode(allow_non_fake_inputs=True))
    assert differences(compare(rows, step_traffic_of_optimizer(run), run.wire_dtypes)) == []
    found = {row["op"]: row["elements"] for row in rows}
    assert found["all_gather"] <= found["reduce_scatter"] <= LIMITS[rule] * MILLION


def step_traffic_of_optimizer(run: Run) -> list[Traffic]:
    return [row for row in step_traffic(run, 0) if row.scope == "optimizer"]


def take_step(run: Run, tensors: AbstractContextManager[Any]) -> list[dict[str, Any]]:
    """Step as the first of ranks that do not exist; return the ledger's rows."""
    bind_device()
    with fake_process_group(run.world):
        dims = ParallelDims(
            **{"dp_replicate": 1, "dp_shard": run.shard, "tp": run.tp, "world_size": run.world},
            **dict.fromkeys(("cp", "pp", "ep", "etp"), 1),
        )
        dims.build_mesh()
        with torch.device("meta"):
            model = LlamaModel(run.args)
        parallelize_llama(model, dims, run.config)
        with tensors:
            model.to_empty(device="cpu")
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        # Outside: the ranks of its groups are numbers.
        optimizer = build_optimizers([model], run.config.optimizer, dims).optimizers[0]
        groups = optimizer.named_groups()
        with tensors, CommLedger([model], groups, (), [optimizer]) as ledger:
            optimizer.step()
    return ledger.rows()
