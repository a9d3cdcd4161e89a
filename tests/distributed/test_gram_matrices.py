# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gram matrices over ranks: rows that they gather, and sums that are not rounded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.training import train
from tests.support.parity_runs import LAYOUTS, largest_difference, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.dtensor import StridedShard, local_slice
from torchtitan_lr.costs.kernels import KernelRecorder
from torchtitan_lr.optim.spectral.layout import GramGroups, GramLayout

BF16_UNIT = 2**-7
"""One unit in the last place of a bf16 number, at most, in units of the number."""


def gather_rows(mesh_ranks: list[int], row_dim: int, r: int, strided: bool) -> tuple[bool, float]:
    """Gather rows that 2 x 2 ranks split; return whether they are right, and the kernels."""
    mesh = DeviceMesh("cpu", torch.tensor(mesh_ranks).view(2, 2))
    placements = [Shard(row_dim), Shard(row_dim)]
    if strided:
        placements[0] = StridedShard(row_dim, split_factor=2)
    full = torch.arange(5.0 * r).view((r, 5) if row_dim == 0 else (5, r))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = local_slice(full, (2, 2), coordinate, tuple(placements)).contiguous()
    wrapped = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    layout = GramLayout.of(wrapped, row_dim)
    groups = GramGroups([layout])
    with KernelRecorder() as recorder:
        (whole,) = groups.gather_rows({"W": (layout, part, r)}).values()
    return whole.equal(full), recorder.work(backward=False, fused=False).kernels


@pytest.mark.parametrize("row_dim", [0, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_gathered_rows(row_dim: int, strided: bool, four_ranks: RankPool) -> None:
    """Equal pieces take one copy, whatever the number of ranks; others one for each rank."""
    in_order, permuted = [0, 1, 2, 3], [2, 0, 3, 1]
    for mesh_ranks, r, at_once in ((in_order, 8, True), (in_order, 9, False), (permuted, 8, False)):
        found = four_ranks.run(gather_rows, mesh_ranks, row_dim, r, strided)
        assert all(right for right, _ in found)
        assert all((kernels <= 2) is at_once for _, kernels in found)


def test_bf16_parameters_are_rounded_as_in_one_process(
    four_ranks: RankPool, reference: Any
) -> None:
    """Activations are fp64: only Gram matrices, fp32, differ by the order of their sums.

    With Gram matrices in bf16, 3% of LoRA-Muon's weights differ, and 41% of Muon's.
    """
    arguments = [*model("cola"), "--optimizer.name=LoRAMuon", "--optimizer.lr=1e-2"]
    arguments += ["--optimizer.adamw_lr=1e-3", "--training.dtype=bfloat16", "--training.steps=3"]
    run = four_ranks.run(train, [*arguments, *LAYOUTS["fsdp2_tp2"][1]])[0]
    alone = reference(*arguments)
    assert largest_difference(run, alone) <= BF16_UNIT
    differ = [(run["parameters"][n] != w).ravel() for n, w in alone["parameters"].items()]
    share = np.concatenate(differ).mean()
    assert share < 0.01
