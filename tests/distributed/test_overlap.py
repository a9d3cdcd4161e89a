# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which products run between start and wait of collectives: of tensor parallelism, of FSDP2."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.distributed.training import small_trainer
from tests.oracle.flops import layer_flops
from tests.support.parity_cases import Case, model_args, shard_model, tp_mesh
from tests.support.rank_pool import RankPool
from torchtitan_lr.collectives import wait
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel import btp, megatron
from torchtitan_lr.parallel.data_parallel import fsdp_modules
from torchtitan_lr.parallel.plan_parts import TPSettings

TOKENS = 2 * 8
SHARDED = ["--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=4"]


def rows_of_a_block(family: str, choices: dict[str, Any], hurried: bool) -> list[dict[str, Any]]:
    """Forward and backward; the ledger's rows of block 1; on a rank."""
    case = Case(family, TPSettings(**choices))
    model = LlamaModel(model_args(case))
    shard_model(case)(model)
    tokens = torch.arange(TOKENS).view(2, -1) % 7
    fault: Any = nullcontext()
    if hurried:  # the control: the reduction ends before the products of the weights start
        paper = btp if case.settings.plan == "btp" else megatron
        start = paper.start_sum
        finished = lambda *args, **owned: wait(start(*args, **owned)).clone()  # noqa: E731
        fault = patch.object(paper, "start_sum", finished)
    with fault, CommLedger([model], {"tp": tp_mesh(2).get_group()}) as ledger:
        out = model(tokens)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        out.square().sum().backward()
    return [row for row in ledger.rows() if row["scope"] == "block 1"]


def weights_flops(plan: str, args: Any) -> int:
    """FLOPs of the column-parallel weights' gradients in a block, of one rank of two."""
    d, kv, f = args.dim, args.kv_dim, args.ffn_dim
    ra, rf = args.rank_attention, args.rank_ffn
    if plan == "btp":  # every B
        size = ra * (2 * d + 2 * kv) + rf * (2 * f + d)
    elif plan == "megatron":  # q, k, v, gate, up
        size = d * (d + 2 * kv + 2 * f)
    else:  # vanilla: every A whose input is replicated
        size = 3 * ra * d + rf * (2 * d + f)
    return 2 * TOKENS * size // 2


@pytest.mark.parametrize(
    ("family", "choices"),
    [
        ("cola", {"plan": "btp"}),
        ("cola", {"plan": "btp", "grouping": False}),
        ("cola", {"plan": "vanilla"}),
        ("full", {"plan": "megatron"}),
    ],
)
def test_weights_gradients_overlap(
    family: str, choices: dict[str, Any], two_ranks: RankPool
) -> None:
    args = model_args(Case(family, TPSettings(**choices)))
    want = weights_flops(choices["plan"], args)
    for rows in two_ranks.run(rows_of_a_block, family, choices, False):
        found = [row for row in rows if row["pass"] == "backward"]
        assert sum(row["overlapped_flops"] for row in found) >= want
    for rows in two_ranks.run(rows_of_a_block, family, choices, True):
        found = [row for row in rows if row["pass"] == "backward"]
        assert found and sum(row["overlapped_flops"] for row in found) == 0


def rows_of_a_step(arguments: list[str], prefetch: bool = True) -> dict[str, Any]:
    """A trainer's second step on a rank: the ledger's rows, and the FLOPs of a block's linears."""
    with small_trainer(arguments) as trainer:
        if not prefetch:  # the control
            for part in trainer.model_parts:
                for module in fsdp_modules([part]):
                    module.set_modules_to_forward_prefetch([])
        batches = iter(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        trainer.step = 2
        with trainer.new_ledger() as ledger:
            trainer.train_step(batches)
        training, args = trainer.job_config.training, llama_args(trainer.job_config)
        flops = layer_flops(args, training.seq_len)
        sequences = training.global_batch_size // 2  # ranks
        block = sequences * (flops.attention_linears + flops.feed_forward)
        return {"rows": ledger.rows(), "block": block, "layers": args.n_layers}


def beside(rows: list[dict[str, Any]], *where: str, dim: str = "fsdp") -> int:
    """Return the FLOPs beside an operation of a scope and pass."""
    found = [r for r in rows if (r["scope"], r["pass"], r["op"], r["mesh_dim"]) == (*where, dim)]
    assert found
    return sum(row["overlapped_flops"] for row in found)


HALF = "--training.mixed_precision_reduce=bfloat16"


@pytest.mark.parametrize("options", [[], [HALF]], ids=["fp32", "bf16"])
def test_fsdp_collectives_run_beside_other_units(options: list[str], two_ranks: RankPool) -> None:
    """Also where FSDP2 casts what a reduction returns."""
    for result in two_ranks.run(rows_of_a_step, [*SHARDED, *options]):
        rows, block, last = result["rows"], result["block"], result["layers"] - 1
        # A block's gather: the block before in forward, the block after in backward.
        assert block / 3 <= beside(rows, "block 1", "forward", "all_gather") < 0.6 * block
        assert 2 * block / 3 <= beside(rows, "block 0", "backward", "all_gather") < 1.2 * block
        assert beside(rows, "block 0", "forward", "all_gather") == 0  # the embedding's lookup
        assert beside(rows, "head", "forward", "all_gather") >= block / 3
        # A block's reduction: backward of the block before.
        found = beside(rows, f"block {last}", "backward", "reduce_scatter")
        assert 2 * block / 3 <= found < 1.2 * block
        assert beside(rows, "embedding", "backward", "reduce_scatter") == 0
    if options:
        return
    for result in two_ranks.run(rows_of_a_step, SHARDED, False):
        assert beside(result["rows"], "block 1", "forward", "all_gather") == 0
        assert beside(result["rows"], "block 0", "backward", "all_gather") > 0


def test_sums_of_cores_run_beside_backward(two_ranks: RankPool) -> None:
    tsr = ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=4"]
    tsr += ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=4", "--optimizer.tsr_stagger"]
    for buckets in (3, 1):  # one bucket is the control: it starts after backward
        choice = f"--optimizer.tsr_overlap_buckets={buckets}"
        for result in two_ranks.run(rows_of_a_step, [*tsr, choice]):
            sums = beside(result["rows"], "step", "optimizer", "all_reduce", dim="dp_replicate")
            assert (sums > 0) == (buckets > 1)
