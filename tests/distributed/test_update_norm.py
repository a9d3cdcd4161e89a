# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The logged norm of a step's update, against singular values of the weights' differences."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_validation import training_batch
from tests.distributed.training import small_trainer
from tests.support.parity_runs import LAYOUTS, degrees, full_parameters, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.update_norm import UPDATE_NORM

REPLICAS = [*degrees(local_batch=2), "--parallelism.data_parallel_replicate_degree=2"]
CASES = {
    "dp1": (1, [*LAYOUTS["dp1"][1], *model("cola")]),
    "hsdp": (4, [*REPLICAS, *model("full")]),
    "fsdp2_tp2": (4, [*LAYOUTS["fsdp2_tp2"][1], *model("cola")]),
    "pp2_tp2": (4, [*LAYOUTS["pp2_tp2"][1], *model("svd")]),
    "tsr": (4, [*REPLICAS, *model("full"), "--optimizer.name=TSRAdam", "--optimizer.tsr_rank=8"]),
}


def one_step(options: list[str]) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Train one step; return the logged norm, and the whole weights before and after it."""
    with small_trainer([*options, "--metrics.update_norm", "--training.seq_len=24"]) as trainer:
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        rank = 0 if mesh is None else mesh.get_local_rank()
        batch = training_batch(rank, trainer.job_config.training.local_batch_size)
        before = full_parameters(trainer.model_parts, everywhere=True)
        trainer.step = 1
        trainer.train_step(iter([batch]))
        after = full_parameters(trainer.model_parts, everywhere=True)
    (record,) = read_history(Path(trainer.job_config.job.dump_folder) / HISTORY_FILE)
    return record[UPDATE_NORM], before, after


@pytest.mark.parametrize("case", CASES)
def test_the_logged_norm_is_that_of_the_weights_difference(
    case: str, one_rank: RankPool, four_ranks: RankPool
) -> None:
    ranks, options = CASES[case]
    pool = one_rank if ranks == 1 else four_ranks
    logged, before, after = pool.run(one_step, options)[0]
    changes = [
        torch.from_numpy(after[name] - value)
        for name, value in before.items()
        if name.startswith("layers.") and value.ndim == 2
    ]
    largest = max(torch.linalg.matrix_norm(change, 2).item() for change in changes)
    assert logged == pytest.approx(largest, rel=0.02)
    # Control: another norm is elsewhere.
    assert max(torch.linalg.matrix_norm(change).item() for change in changes) > 1.2 * largest
