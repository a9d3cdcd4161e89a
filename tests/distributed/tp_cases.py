# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What tests alone do with a tensor-parallel case: wrappers, some steps."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.parity_cases import (
    Case,
    compile_named,
    parity,
    run_model,
    tp_mesh,
)
from torchtitan_lr.models.llama import LlamaModel


def compile_last_block(model: LlamaModel, case: Case) -> None:
    """The one that receives LaX's latents; two of them would cost twice as much."""
    compile_named(model, list(model.layers)[-1:])


def fully_shard_blocks(model: LlamaModel, case: Case) -> None:
    """FSDP2 over the replicas, all of which see the same data: gradients are averaged."""
    mesh = tp_mesh(case.degree)._get_root_mesh()["dp"]
    units: list[Any] = [model.tok_embeddings, *model.layers.values()]
    for unit in (*units, [model.norm, model.output], model):
        fully_shard(unit, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(mesh.size()))


def parities(cases: list[Case]) -> list[dict[str, float]]:
    return [parity(case) for case in cases]


def train_steps(model: LlamaModel, steps: int = 5) -> tuple[list[float], LlamaModel]:
    """AdamW with clipping on fixed tokens; the gradient norms, and the model."""
    # With Adam's usual ε, 1e-8, entries next to nothing would enlarge the rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        run_model(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms, model
