# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Small models whose gradients are compressed, on four ranks.

Gradients here are whole numbers, whose sums are exact in fp32: what equals, equals in every bit.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lr.compression import sizes
from torchtitan_lr.compression.settings import CompressionSettings
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.compression.units import apply_gradient_compression
from torchtitan_lr.parallel.data_parallel import sum_gradients, synchronize_gradients

SHAPES = {"wide": (37, 11), "tiny": (3,), "tall": (50, 7), "odd": (5, 13), "scale": (1,)}
"""None divides by the ranks; `min_size` 60 leaves two of them dense, between the others."""


@dataclass(frozen=True)
class Case:
    """What to compress, on which layout."""

    codec: CodecSizes
    hsdp: bool = False
    microbatches: int = 1
    min_size: int = 60
    layers: str = "all"
    forced: bool = False
    """Whether units send a sketch that they are too small for."""

    @property
    def ranks(self) -> int:
        return 2 if self.hsdp else 4

    def settings(self) -> CompressionSettings:
        return CompressionSettings(
            codec=self.codec,
            requested_theta=self.codec.theta,
            ranks=self.ranks,
            layers=self.layers,
            min_size=self.min_size,
        )


class Weighted(nn.Module):
    """Its output's gradient with respect to each parameter is what `gradients` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        for name, gradient in self.gradients.items():
            x = x + (getattr(self, name) * gradient).sum()
        return x


def gradient(name: str, unit: int, rank: int, step: int, micro: int) -> Tensor:
    """Whole numbers of very different size, as gradients are."""
    seed = hash((len(name), SHAPES[name], unit, rank, step, micro)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPES[name], generator=generator).exp() * 100).round()


@cache
def layout(hsdp: bool) -> DeviceMesh:
    """Two replicas of two shards, or four shards; the groups are made once."""
    shape = (2, 2) if hsdp else (1, 4)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "fsdp"))


def build(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Weighted(), Weighted())
    meshes = layout(case.hsdp)
    shard_mesh, mesh = meshes["fsdp"], meshes["dp_replicate" if case.hsdp else "fsdp"]
    for unit in (*model, model):
        fully_shard(unit, mesh=shard_mesh)
    sum_gradients(model)
    if case.codec.name != "none":
        compress(model, mesh, case)
    return model, mesh


def compress(model: nn.Module, mesh: DeviceMesh, case: Case) -> None:
    forced = patch.multiple(sizes, PEELING_LIMIT=99, SHARP_LIMIT=99)
    with forced if case.forced else nullcontext():
        apply_gradient_compression(model, mesh, case.settings(), all_reduce=case.hsdp)


def step_gradients(model: nn.Module, case: Case, step: int) -> dict[str, Tensor]:
    """Run one step's micro-batches; return the full gradients."""
    for p in model.parameters():
        p.grad = None
    for micro in range(case.microbatches):
        synchronize_gradients([model], micro == case.microbatches - 1)
        for index, unit in enumerate(model):
            unit.gradients = {n: gradient(n, index, dist.get_rank(), step, micro) for n in SHAPES}
        model(torch.zeros(2, requires_grad=True)).sum().backward()
    # The output counts every gradient twice: it has two entries.
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


SKETCH = CodecSizes("sketch", 4, 0.96)
"""Units here are small: at the smallest theta for large ones they would travel dense."""

CASES = {
    "sparse": Case(CodecSizes("sparse", 1, 0.9)),
    "sketch": Case(SKETCH),
    "sketch_10x": Case(CodecSizes("sketch", 10, 0.9875)),
    "sketch_that_sticks": Case(CodecSizes("sketch", 10, 0.8), forced=True),
    "sparse_accumulate3": Case(CodecSizes("sparse", 1, 0.9), microbatches=3),
    "sketch_accumulate3": Case(SKETCH, microbatches=3),
    "sparse_hsdp": Case(CodecSizes("sparse", 1, 0.9), hsdp=True),
    "sparse_hsdp_dense_return": Case(CodecSizes("sparse", 1, 0.4), hsdp=True),
    "sparse_half_hsdp": Case(CodecSizes("sparse", 1, 0.9, half=True), hsdp=True),
    "sketch_half": Case(replace(SKETCH, half=True)),
    "sketch_hsdp": Case(CodecSizes("sketch", 10, 0.9875), hsdp=True, microbatches=2),
}
