# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam on a mesh of four ranks against its one-process twin, with gradients made up here."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.reference.tsr_adam import Hyper, ReferenceTSR
from torchtitan_lr.compat.dtensor import local_slice
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.selection import TSRSettings, plan_matrices

SHAPES: dict[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (14, 8),
    "layers.0.attention.wq.weight": (8, 6),
    "layers.0.attention.wk.weight": (8, 6),
    "layers.0.attention.wv.weight": (8, 6),
    "layers.0.attention.wo.weight": (5, 8),
    "layers.0.feed_forward.w1.weight": (10, 7),
    "layers.1.feed_forward.w2.weight": (6, 12),
    "layers.1.ffn_norm.weight": (6,),
    "output.weight": (14, 8),
}
"""Over four shards, 14, 10 and 6 rows are uneven, and the fourth of 5 rows' shards is empty."""

SINGULAR = "tok_embeddings.weight"
"""Its gradient has rank 2, less than the embedding's rank."""

ZERO = "layers.0.attention.wv.weight"
"""Its gradient is zero."""

COLUMN = ("wo.weight", "w2.weight", "tok_embeddings.weight")
"""Split along columns under tensor parallelism; other matrices along rows."""

BASE = TSRSettings(
    rank=3,
    refresh_interval=3,
    oversampling=1,
    embedding_rank=4,
    embedding_refresh_interval=2,
    refresh="sketch",
    overlap_buckets=1,
)
HYPER = Hyper(lr=0.05, eps=1e-6, weight_decay=0.1, scale=0.75)
DEFAULTS = HYPER.defaults()
STEPS = 7
MAX_NORM = 2.0


@dataclass(frozen=True)
class Case:
    """A layout and how to train on it."""

    layout: str
    settings: TSRSettings = field(default_factory=lambda: BASE)
    microbatches: int = 1
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        changed = [
            f"{name}={getattr(self.settings, name)}"
            for name in TSRSettings.__dataclass_fields__
            if getattr(self.settings, name) != getattr(BASE, name)
        ]
        return "-".join([self.layout, *changed, f"micro{self.microbatches}"])


@dataclass
class Layout:
    """This rank's place: its mesh of shards, its replica, its pipeline stage."""

    mesh: Any = None
    replicas: Any = None
    replica: tuple[int, int] = (0, 1)
    stages: Any = None
    stage: tuple[int, int] = (0, 1)


LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "replicate4": (("dp_replicate",), (4,)),
    "hsdp2x2": (("dp_replicate", "fsdp"), (2, 2)),
    "fsdp4": (("fsdp",), (4,)),
    "tp2xdp2": (("dp_replicate", "tp"), (2, 2)),
    "fsdp2xtp2": (("fsdp", "tp"), (2, 2)),
    "pp2xdp2": (("pp", "dp_replicate"), (2, 2)),
    "alone": ((), ()),
}


def place(name: str) -> Layout:
    names, sizes = LAYOUTS[name]
    if not names:
        return Layout()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    layout = Layout()
    inner = tuple(n for n in names if n in ("fsdp", "tp"))
    layout.mesh = mesh[inner] if inner else None
    if "dp_replicate" in names:
        part = mesh["dp_replicate"]
        layout.replicas = part.get_group()
        layout.replica = (part.get_local_rank(), part.size())
    if "pp" in names:
        layout.stages = mesh["pp"].get_group()
        layout.stage = (mesh["pp"].get_local_rank(), mesh["pp"].size())
    return layout


def placements(name: str, mesh: Any) -> tuple[Any, ...]:
    tp: Any = Replicate() if len(SHAPES[name]) == 1 else Shard(1 if name.endswith(COLUMN) else 0)
    if mesh.mesh_dim_names == ("tp",):
        return (tp,)
    if mesh.mesh_dim_names == ("fsdp",):
        return (Shard(0),)
    return (_StridedShard(0, split_factor=2) if tp == Shard(0) else Shard(0), tp)


def distribute(name: str, full: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.mesh is None:
        return full.clone()
    mesh, chosen = layout.mesh, placements(name, layout.mesh)
    part = local_slice(full, tuple(mesh.shape), mesh.get_coordinate(), chosen).clone()
    return DTensor.from_local(
        part, mesh, chosen, run_check=False, shape=full.shape, stride=full.stride()
    )


def own_names(layout: Layout) -> list[str]:
    stage, count = layout.stage
    return [name for i, name in enumerate(SHAPES) if i * count // len(SHAPES) == stage]


def build_model(layout: Layout, dtype: torch.dtype) -> nn.Module:
    """Modules with the parameters of this rank's stage, under their names."""
    root = nn.Module()
    for name, full in weights(dtype).items():
        if name in own_names(layout):
            *path, leaf = name.split(".")
            owner = root
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(leaf, nn.Parameter(distribute(name, full, layout)))
    return root


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in SHAPES.items()
    }


def gradient(name: str, step: int, part: int, dtype: torch.dtype) -> torch.Tensor:
    """A gradient with a decaying spectrum; the eight parts of a step add up to the step's."""
    shape = SHAPES[name]
    if name == ZERO:
        return torch.zeros(shape, dtype=dtype)
    seed = 10_000 * step + 100 * part + list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    if len(shape) == 1:
        return draw(*shape).to(dtype)
    rank = min(shape)
    values = 2.0 ** -torch.arange(rank, dtype=torch.float64)
    shared = torch.Generator().manual_seed(step + 1)
    right = torch.randn(rank, shape[1], generator=shared, dtype=torch.float64)
    full = (draw(shape[0], rank) * values) @ right
    if name == SINGULAR:
        full[2:] = 0
    return full.to(dtype)


PARTS = 8


def parts_of(layout: Layout, microbatches: int) -> list[list[int]]:
    """The parts of a step's gradient that this rank computes, by micro-batch."""
    index, count = layout.replica
    own = list(range(PARTS))[index * PARTS // count : (index + 1) * PARTS // count]
    # Sharded without replicas: FSDP has summed the ranks' gradients already.
    size = -(-len(own) // microbatches)
    return [own[i : i + size] for i in range(0, len(own), size)]


def train(
    case: Case, layout: Layout | None = None, steps: int = STEPS
) -> tuple[nn.Module, TSROptimizers, list[float]]:
    layout = layout or place(case.layout)
    model = build_model(layout, case.dtype)
    optimizer = TSROptimizers(
        [model], case.settings, DEFAULTS, replicas=layout.replicas, stages=layout.stages
    )
    norms = [take_step(model, optimizer, layout, case, step) for step in range(steps)]
    return model, optimizer, norms


def sum_over_ranks(share: torch.Tensor) -> torch.Tensor:
    """Sum the shares of a squared norm, as the trainer's verdict does."""
    if dist.is_initialized():
        dist.all_reduce(share)
    return share


def take_step(
    model: nn.Module,
    optimizer: TSROptimizers,
    layout: Layout,
    case: Case,
    step: int,
) -> float:
    gradients = optimizer.gradients
    optimizer.zero_grad()
    gradients.begin()
    batches = parts_of(layout, case.microbatches)
    for i, parts in enumerate(batches):
        with gradients.micro_batch(last=i == len(batches) - 1):
            for name, parameter in model.named_parameters():
                full = sum(gradient(name, step, part, case.dtype) for part in parts)
                assert isinstance(full, torch.Tensor)
                piece = distribute(name, full, layout)
                parameter.grad = piece if parameter.grad is None else parameter.grad + piece
    norm = sum_over_ranks(gradients.finish_sums()).sqrt()
    gradients.clip(MAX_NORM, norm)
    optimizer.step()
    gradients.settle(rejected=False)
    return norm.item()


def twin(case: Case, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train in one process, with the whole gradient."""
    settings = case.settings
    plans = plan_matrices(SHAPES, settings)
    reference = ReferenceTSR(weights(case.dtype), plans, settings, HYPER, MAX_NORM)
    norms = []
    for step in range(steps):
        total = {
            name: torch.stack([gradient(name, step, p, case.dtype) for p in range(PARTS)]).sum(0)
            for name in SHAPES
        }
        norms.append(reference.step(total))
    return reference.weights, norms


@cache
def twin_of(settings: Any, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The twin's result, once for all layouts and numbers of micro-batches."""
    return twin(Case("alone", settings, dtype=dtype))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parity(case: Case) -> dict[str, float]:
    """Largest relative error of every parameter, and of the norms, on this rank."""
    expected, expected_norms = twin_of(case.settings, case.dtype)
    model, _, norms = train(case)
    errors = {
        name: relative(full(parameter.detach()), expected[name])
        for name, parameter in model.named_parameters()
    }
    errors["norms"] = relative(torch.tensor(norms), torch.tensor(expected_norms))
    return errors
