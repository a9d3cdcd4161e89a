# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers that a spectral optimizer sends: limits at 1B by formula, and by the code itself."""

import pytest

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.step_traffic import step_traffic

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


def step_traffic_of_optimizer(run: Run) -> list[Traffic]:
    return [row for row in step_traffic(run, 0) if row.scope == "optimizer"]
