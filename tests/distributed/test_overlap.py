# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What runs beside collectives: of tensor parallelism, and of FSDP2."""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.distributed.training import small_trainer
from tests.support.parity_cases import Case, model_args, shard_model
from tests.support.rank_pool import RankPool
from torchtitan_lr.collectives import wait
from torchtitan_lr.compat import process_groups
from torchtitan_lr.compat.dispatch import storage_address
from torchtitan_lr.ledger.ledger import ScopeTracker, identify
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel import btp, megatron
from torchtitan_lr.parallel.data_parallel import fsdp_modules
from torchtitan_lr.parallel.plan_parts import TPSettings

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Issued(TorchDispatchMode):
    """What a rank issues, in order, and the FLOPs between start and wait of functional calls."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.tracker = ScopeTracker(parts)
        self.events: list[tuple[str, str]] = []  # operation and pass
        self.beside: Counter[tuple[str, str]] = Counter()  # FLOPs by scope and pass
        self.running: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | process_groups.AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, (scope, pass_, _) = func.overloadpacket, self.tracker.here()
        if packet is process_groups.functional.wait_tensor:
            self.running.discard(storage_address(args[0]))
        elif call := identify(func, args, kwargs):
            self.events.append((call.op, pass_))
            if isinstance(result, torch.Tensor):
                self.running.add(storage_address(result))
        elif packet in PRODUCTS:
            self.events.append(("product", pass_))
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.beside[scope, pass_] += flops * bool(self.running)
        return result


TOKENS = 2 * 8


def beside_a_block(family: str, choices: dict[str, Any], hurried: bool) -> int:
    """Return the FLOPs beside the sums of block 1's backward, on a rank."""
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
    with fault, Issued([model]) as issued:
        out = model(tokens)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        out.square().sum().backward()
    return issued.beside["block 1", "backward"]


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
    for flops in two_ranks.run(beside_a_block, family, choices, False):
        assert flops >= want
    for flops in two_ranks.run(beside_a_block, family, choices, True):
        assert flops == 0


def gathers_ahead(prefetch: bool) -> int:
    """Return the gathers of a trainer's second step before its first product, on a rank."""
    options = ["--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=4"]
    with small_trainer(options) as trainer:
        if not prefetch:  # the control
            for module in fsdp_modules(trainer.model_parts):
                module.set_modules_to_forward_prefetch([])
        batches = iter(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        trainer.step = 2
        with Issued(trainer.model_parts) as issued:
            trainer.train_step(batches)
    before = issued.events[: issued.events.index(("product", "forward"))]
    return before.count(("all_gather", "forward"))


def test_the_next_block_is_gathered_before_a_block_runs(two_ranks: RankPool) -> None:
    """Of the norm, the embedding, block 0 and, ahead, block 1."""
    assert two_ranks.run(gathers_ahead, True) == [4, 4]
    assert two_ranks.run(gathers_ahead, False) == [3, 3]
