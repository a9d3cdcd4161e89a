# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which products run between start and wait of the tensor-parallel collectives of a block."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.distributed.tp_faults import replaced
from torchtitan_lr.ledger.ledger import CommLedger, mesh_dims_of
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.tensor.collectives import wait
from torchtitan_lr.parallel.tensor.plan import TPSettings
from torchtitan_lr.parallel.tensor.shared_linear import SharedInput
from torchtitan_lr.tools.parity_cases import Case, model_args, shard_model, tp_mesh
from torchtitan_lr.tools.rank_pool import RankPool

TOKENS = 2 * 8


def rows_of_a_block(family: str, choices: dict[str, Any], hurried: bool) -> list[dict[str, Any]]:
    """Forward and backward; the ledger's rows of block 1; on a rank."""
    case = Case(family, TPSettings(**choices), degree=2, dtype=torch.float32)
    model = LlamaModel(model_args(case))
    shard_model(case)(model)
    tokens = torch.arange(TOKENS).view(2, -1) % 7
    fault: Any = nullcontext()
    if hurried:  # the control: the reduction ends before the products of the weights start
        start = SharedInput.start_sum
        finished = lambda self, gradient: wait(start(self, gradient)).clone()  # noqa: E731
        fault = replaced(SharedInput, "start_sum", finished)
    with fault, CommLedger([model], mesh_dims_of({"tp": tp_mesh(2)})) as ledger:
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
    args = model_args(Case(family, TPSettings(**choices), degree=2, dtype=torch.float32))
    want = weights_flops(choices["plan"], args)
    for rows in two_ranks.run(rows_of_a_block, family, choices, False):
        found = [row for row in rows if row["pass"] == "backward"]
        assert sum(row["overlapped_flops"] for row in found) >= want
    for rows in two_ranks.run(rows_of_a_block, family, choices, True):
        found = [row for row in rows if row["pass"] == "backward"]
        assert found and sum(row["overlapped_flops"] for row in found) == 0


@pytest.mark.parametrize("grouping", [True, False])
def test_btp_forward(grouping: bool, two_ranks: RankPool) -> None:
    """The norms' statistics run beside A x; without grouping, latents run beside the next A."""
    choices = {"plan": "btp", "grouping": grouping}
    args = model_args(Case("cola", TPSettings(**choices), degree=2, dtype=torch.float32))
    normed = TOKENS * args.dim * (3 * args.rank_attention + 2 * args.rank_ffn)  # 2 FLOPs / 2 ranks
    ungrouped = normed - TOKENS * args.dim * (args.rank_attention + args.rank_ffn)
    for rows in two_ranks.run(rows_of_a_block, "cola", choices, False):
        found = sum(row["overlapped_flops"] for row in rows if row["pass"] == "forward")
        assert found >= (normed if grouping else normed + ungrouped)
