# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP2 with A (r, d_in) split along d_in: which factors, and what compresses their gradients.

That every layout trains like one process, and resumes in another one, is in `test_layout`.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.training import train
from tests.support.parity_runs import degrees, model
from tests.support.rank_pool import RankPool
from tests.unit.tiny import tiny_args
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.data_parallel import split_outside_rank
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel

COLA = [*model("cola"), "--training.seq_len=64"]
MUON = ["--optimizer.name=Muon", "--optimizer.lr=1e-3"]
FSDP4 = degrees(local_batch=2)


def test_residuals_of_the_other_split_are_refused(four_ranks: RankPool) -> None:
    """Of equal shapes and tensors, but in another order."""
    options = [*COLA, *FSDP4, "--training.steps=4", "--checkpoint.enable"]
    options += ["--grad_compression.codec=sparse", "--grad_compression.min_size=1"]
    stopped = four_ranks.run(train, [*options, *MUON], "sigterm@2")[0]
    adamw = [*options, "--checkpoint.exclude_from_loading=optimizer", "--checkpoint.load_step=2"]
    way = "--checkpoint.exclude_from_loading=optimizer,grad_compression --checkpoint.load_step=2"
    for error in four_ranks.errors(train, adamw, "", stopped["dump_folder"]):
        assert "optimizer.name: got 'AdamW', expected 'Muon' as in " in error
        assert f"{way} goes on without its grad_compression; " in error


def split(args: LlamaArgs, ranks: int, settings: TPSettings | None = None) -> dict[str, int]:
    """Return by name the dimension in which FSDP2 would split each factor of a block."""
    with torch.device("meta"):
        model = LlamaModel(args)
    if settings is not None:
        with fake_process_group(2):
            apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), settings)
    choose = split_outside_rank(model, ranks)
    return {name: choose(p).dim for name, p in model.layers["0"].named_parameters()}


def test_which_factors() -> None:
    """d_in is outside r, where the ranks divide it and tensor parallelism left r whole."""
    names = split(tiny_args("cola"), 2)
    factors = {name for name in names if name.endswith("A.weight")}

    def by_columns_of(*arguments: Any) -> set[str]:
        return {name for name, dim in split(*arguments).items() if dim == 1}

    assert by_columns_of(tiny_args("cola"), 16) == factors
    assert by_columns_of(tiny_args("cola"), 16, TPSettings("btp")) == set()  # 24 columns, 40
    assert by_columns_of(tiny_args("cola"), 3) == factors - {"feed_forward.w2.A.weight"}
    assert by_columns_of(tiny_args("cola"), 4, TPSettings("btp")) == factors
    assert by_columns_of(tiny_args("cola"), 4, TPSettings("vanilla")) == set()
    assert by_columns_of(tiny_args("full"), 4) == set()
