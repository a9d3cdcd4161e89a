# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""FSDP2 with A (r, d_in) split along d_in: what compresses the gradients of such factors."""

from tests.distributed.training import train
from tests.support.parity_runs import degrees, model
from tests.support.rank_pool import RankPool

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
