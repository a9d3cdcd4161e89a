# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP2 with A (r, d_in) split along d_in, as for spectral optimizers.

AdamW works entry by entry, so with it only the placement can change a weight.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.data_layouts import LAYOUTS as DATA
from tests.distributed.training import train
from tests.support.parity_runs import EXACT, LAYOUTS, largest_difference, model
from tests.support.rank_pool import RankPool
from tests.unit.tiny import tiny_args
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel import data_parallel
from torchtitan_lr.parallel.placement import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel

COLA = model("cola")
BTP = LAYOUTS["fsdp2_tp2"][1]


def by_columns(*arguments: Any) -> dict[str, Any]:
    """Train with AdamW and the placement of the spectral optimizers."""
    choose = data_parallel.split_outside_rank
    with (
        patch.object(data_parallel, "SPECTRAL", ("AdamW",)),
        patch.object(data_parallel, "split_outside_rank", wraps=choose) as chosen,
    ):
        result = train(*arguments)
    chosen.assert_called()
    return result


@pytest.mark.parametrize("options", [DATA["fsdp4"], DATA["hsdp2x2_accumulate2"], BTP])
def test_weights_of_one_process(options: list[str], four_ranks: RankPool, reference: Any) -> None:
    run = four_ranks.run(by_columns, [*COLA, *options])[0]
    assert largest_difference(run, reference(*COLA)) < EXACT


def test_resumes_by_rows(four_ranks: RankPool, reference: Any) -> None:
    """From A in columns over BTP x FSDP2, to A in rows over FSDP2."""
    options = [*COLA, "--training.steps=4", "--checkpoint.enable"]
    stopped = four_ranks.run(by_columns, [*options, *BTP], "sigterm@2")[0]
    resumed = four_ranks.run(train, [*options, *DATA["fsdp4"]], "", stopped["dump_folder"])[0]
    assert stopped["step"] == 2
    assert largest_difference(resumed, reference(*COLA, "--training.steps=4")) < EXACT


def test_compressed_exchange(four_ranks: RankPool, reference: Any) -> None:
    """A codec that sends everything, whose rows follow FSDP2's buffer."""
    options = [*COLA, "--training.seq_len=64"]
    codec = ["sparse", "--grad_compression.level=custom", "--grad_compression.theta=0"]
    compressed = [*options, *DATA["fsdp4"], "--grad_compression.codec", *codec]
    run = four_ranks.run(by_columns, compressed)[0]
    assert largest_difference(run, reference(*options)) < EXACT


def test_residuals_of_the_other_split_are_refused(four_ranks: RankPool) -> None:
    """Of equal shapes and tensors, but in another order."""
    codec = ["--grad_compression.codec=sparse", "--grad_compression.min_size=1"]
    options = [*COLA, *DATA["fsdp4"], *codec, "--training.steps=4", "--checkpoint.enable"]
    stopped = four_ranks.run(by_columns, options, "sigterm@2")[0]
    for error in four_ranks.errors(train, options, "", stopped["dump_folder"]):
        assert "A.weight is split along its other dimension" in error


def split(args: LlamaArgs, ranks: int, settings: TPSettings | None = None) -> dict[str, int]:
    """Return by name the dimension in which FSDP2 would split each factor of a block."""
    with torch.device("meta"):
        model = LlamaModel(args)
    if settings is not None:
        with fake_process_group(2):
            apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), settings)
    choose = data_parallel.split_outside_rank(model, ranks)
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
