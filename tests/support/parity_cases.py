# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Small models under tensor parallelism, built alone, without a trainer."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tests.support.parity_runs  # noqa: F401  (adds the flavor)
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import apply_tensor_parallel, resolve_settings

BATCH, TOKENS, VOCABULARY = 2, 8, 64


@dataclass(frozen=True)
class Case:
    family: str = "cola"
    settings: TPSettings = field(default_factory=TPSettings)
    degree: int = 2
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.settings.plan}-{self.family}-{self.settings.comm}-{dtype}"


def model_args(case: Case) -> LlamaArgs:
    usual = FLAVORS[case.family]["parity"]
    return replace(usual, vocab_size=VOCABULARY, max_seq_len=TOKENS)


def build_model(case: Case, prepare: Callable[[LlamaModel], None]) -> LlamaModel:
    """Build on the meta device, shard, and initialize, as the trainer does."""
    with torch.device("meta"):
        model = LlamaModel(model_args(case))
    model.to(case.dtype)
    prepare(model)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


@cache
def tp_mesh(degree: int) -> DeviceMesh:
    """Return a mesh of the first ranks, or of as many replicas as there are."""
    shape = (dist.get_world_size() // degree, degree)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def shard_model(case: Case) -> Callable[[LlamaModel], None]:
    settings = resolve_settings(case.settings, model_args(case), case.degree, TOKENS)
    return lambda model: apply_tensor_parallel(model, tp_mesh(case.degree), settings)


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return ((a - b).abs().max() / b.abs().max()).item()
