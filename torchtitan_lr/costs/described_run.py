# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Description of a run for estimates: model, plan, mesh, and modules of each pipeline rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch.distributed.tensor import Shard

from torchtitan_lr.compression.settings import CompressionSettings, compression_settings
from torchtitan_lr.costs.hardware import MeshDim
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.optimizer_costs import NamedShapes, OptimizerCost, OuterCost, Shape
from torchtitan_lr.costs.tp_messages import model_traffic
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model, llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES, OptimizerEntry, imported
from torchtitan_lr.parallel.capture import why_eager
from torchtitan_lr.parallel.checkpoint_modes import keeps_inputs
from torchtitan_lr.parallel.data_parallel import reshard_after_forward
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import PLANS, tp_settings
from torchtitan_lr.parallel.stage_split import SCHEDULES, modules_per_stage
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP


@dataclass(frozen=True)
class Precision:
    """Bytes per element."""

    parameter: int  # stored weights, their gradients and moments (``training.dtype``)
    compute: int  # gathered weights and activations (``training.mixed_precision_param``)
    reduce: int  # FSDP2's gradients on the wire (``training.mixed_precision_reduce``)


@dataclass
class Run:
    """A configuration with the model and the plan to estimate."""

    config: Any  # returned by `build_job_config`, checked for ``world`` ranks
    world: int
    args: LlamaArgs
    settings: TPSettings  # the resolved tensor-parallel plan
    baseline: bool = False  # Whether AdamW and uncompressed gradients replace the configured ones

    def __post_init__(self) -> None:
        section, training = self.config.parallelism, self.config.training
        self.tp: int = section.tensor_parallel_degree  # T
        self.pp: int = section.pipeline_parallel_degree  # P
        self.replicas: int = section.data_parallel_replicate_degree  # ranks with equal parameters
        self.cp: int = section.context_parallel_degree  # ranks C that share each row of tokens
        self.gather: str = section.cp_gather  # from those ranks: "kv" or "latents"
        # Ranks that share each parameter; those that share a row are among them.
        self.shard = self.world // (self.tp * self.pp * self.replicas)
        self.seq_len: int = training.seq_len  # tokens s
        size = section.pipeline_parallel_microbatch_size if self.pp > 1 else 0
        self.microbatch: int = size or training.local_batch_size  # sequences b
        # Micro-batches of a pass, 1 without a pipeline, and passes of a step.
        self.microbatches: int = training.local_batch_size // self.microbatch
        self.accumulation = 1
        if training.global_batch_size != -1:
            rows = training.local_batch_size * (self.shard // self.cp) * self.replicas
            self.accumulation = training.global_batch_size // rows
        self.tokens = self.microbatch * self.seq_len // self.cp  # n of a micro-batch on a rank
        self.rounds = self.microbatches * self.accumulation  # micro-batches of a step
        self.tokens_per_step = self.tokens * self.rounds * self.shard * self.replicas  # of all
        self.checkpointing: str = self.config.activation_checkpoint.mode
        # Whether stages compute the gradients of inputs first, and those of weights later
        self.splits_backward = self.pp > 1 and SCHEDULES[section.pipeline_parallel_schedule][1]

    @cached_property
    def mesh(self) -> dict[str, MeshDim]:
        """Sizes and strides of the mesh dimensions, innermost first, in torchtitan's order."""
        shards = self.shard * self.tp
        return {
            "tp": MeshDim(self.tp, 1),
            # FSDP's dimension is torchtitan's dp_shard over cp, of which cp is the inner one.
            "cp": MeshDim(self.cp, self.tp),
            "fsdp": MeshDim(self.shard, self.tp),
            "fsdp_tp": MeshDim(shards, 1),  # of r × r sums
            "dp_replicate": MeshDim(self.replicas, shards),
            "pp": MeshDim(self.pp, shards * self.replicas),
        }

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks by mesh dimension."""
        return {name: dim.size for name, dim in self.mesh.items()}

    @property
    def precision(self) -> Precision:
        """Bytes per element."""
        training = self.config.training
        # A codec gets gradients that are not rounded yet.
        whole = self.compresses and self.replicas == 1
        reduced = "float32" if whole else training.mixed_precision_reduce
        names = training.dtype, training.mixed_precision_param, reduced
        return Precision(*(TORCH_DTYPE_MAP[name].itemsize for name in names))

    @property
    def wire_dtypes(self) -> dict[str, str]:
        """Name of the dtype in which tensors are sent, by `Traffic.role`.

        Of an optimizer's sums over the replicas, ``stored`` are dense gradients, ``replicas`` the
        rest.
        """
        training = self.config.training
        reduced = training.mixed_precision_reduce
        roles = dict.fromkeys(("activation", "parameter"), training.mixed_precision_param)
        wide = ("statistic", "loss", "core", "sketch", "basis", "gram", "momentum")
        roles |= dict.fromkeys(wide, "float32") | dict.fromkeys(("gradient", "replicas"), reduced)
        roles["stored"] = reduced if reduced == "bfloat16" else training.dtype
        return roles | {"checksum": "int64", "index": "uint8", "outer": training.dtype}

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 gathers weights again for backward."""
        return self.shard > 1 and reshard_after_forward(self.config, self.pp > 1)

    @property
    def wrapped(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        sizes = self.precision
        return self.shard > 1 or self.replicas > 1 or sizes.compute != sizes.parameter

    @property
    def captured(self) -> bool:
        """Whether a GPU runs each pass as one graph."""
        config = self.config
        if self.baseline:
            optimizer = replace(config.optimizer, name="AdamW")
            compression = replace(config.grad_compression, codec="none")
            config = replace(config, optimizer=optimizer, grad_compression=compression)
        return not why_eager(config, self.world, "cuda")

    @property
    def steps_differ(self) -> bool:
        """Whether some steps after the first ones cannot be those that were captured."""
        counted = self.config.metrics.comm_ledger and self.world > 1
        return bool(counted or not self.optimizer.steps_alike)

    @property
    def keeps_inputs(self) -> bool:
        """Whether blocks keep inputs of products that backward can make again."""
        return self.args.low_rank and keeps_inputs(self.config.activation_checkpoint)

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed."""
        sharded = self.shard > 1 or self.replicas > 1
        return not self.baseline and sharded and self.config.grad_compression.codec != "none"

    @cached_property
    def compression(self) -> CompressionSettings:
        """How gradients are compressed: over HSDP's replicas, otherwise over the shards."""
        return compression_settings(self.config, self.replicas if self.replicas > 1 else self.shard)

    @property
    def entry(self) -> OptimizerEntry:
        """The optimizer's entry; of the baseline AdamW's."""
        return ENTRIES["AdamW" if self.baseline else self.config.optimizer.name]

    @cached_property
    def optimizer(self) -> OptimizerCost:
        """What the optimizer sends, holds and computes; AdamW's of one that does not say it."""
        cost: OptimizerCost = imported(self.entry.cost or OptimizerCost)(self)
        return cost

    @cached_property
    def outer(self) -> OuterCost:
        """What outer steps send and hold."""
        return OuterCost(self)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Parameters of the model, and FLOPs of a token."""
        return self.args.get_nparams_and_flops(empty_model(self.args), self.seq_len)

    @cached_property
    def tp_messages(self) -> list[Traffic]:
        """Collectives of tensor parallelism in a micro-batch, of all ranks of a pipeline."""
        return model_traffic(self.args, self.settings, self.tp, self.tokens)

    @cached_property
    def global_shapes(self) -> dict[str, Shape]:
        """Shape of every parameter of the whole model."""
        return model_shapes(self.args)

    @cached_property
    def local_shapes(self) -> dict[str, Shape]:
        """What tensor parallelism leaves a rank of every parameter of the whole model."""
        shapes = dict(self.global_shapes)
        if self.tp == 1:
            return shapes
        for name, shape in shapes.items():
            placement = PLANS[self.settings.plan].placement(name)
            if isinstance(placement, Shard):
                dim = placement.dim
                shapes[name] = (*shape[:dim], shape[dim] // self.tp, *shape[dim + 1 :])
        return shapes

    @cached_property
    def by_columns(self) -> set[str]:
        """Names of the parameters that FSDP2 splits along their columns, and not their rows.

        For a spectral optimizer: the A (r, d_in) with a whole r whose columns the ranks divide.
        """
        found: set[str] = set()
        for name, size in self.local_shapes.items() if self.entry.splits_columns else ():
            if name.endswith(".A.weight") and size[0] == self.global_shapes[name][0]:
                found |= {name} if size[1] % self.shard == 0 else set()
        return found

    def splits(self, name: str) -> list[tuple[str, ...]]:
        """Return the mesh dimensions that split each dimension of a matrix."""
        whole, local, splits = self.global_shapes[name], self.local_shapes[name], []
        for dim in (0, 1):
            by_fsdp = self.shard > 1 and dim == int(name in self.by_columns)
            names = ["fsdp"] if by_fsdp else []
            names += ["tp"] if local[dim] != whole[dim] else []
            splits.append(tuple(names))
        return splits

    def piece(self, name: str, rank: int = 0) -> Shape:
        """Return the shape of an FSDP rank's piece of a parameter.

        Pieces have ceil(rows / ranks) rows: the first rank has most, the last may have none.
        """
        piece, dim = list(self.local_shapes[name]), int(name in self.by_columns)
        length = -(-piece[dim] // self.shard)
        piece[dim] = max(0, min(length, piece[dim] - rank * length))
        return tuple(piece)

    @cached_property
    def stages(self) -> list[dict[str, NamedShapes]]:
        """FSDP units of every pipeline stage: shapes on a tensor-parallel rank, by name."""
        units: dict[str, dict[str, Shape]] = {}
        for name, shape in self.local_shapes.items():
            units.setdefault(unit_of(name), {})[name] = shape
        if self.pp == 1:
            return [dict(units)]
        stages = modules_per_stage(self.config, self.args.n_layers)
        return [{unit_of(name): units[unit_of(name)] for name in names} for names in stages]

    def stages_of(self, pp_rank: int) -> list[int]:
        """Return the stages of a pipeline rank, assigned as in torch."""
        count = len(self.stages)
        if self.splits_backward:
            return [pp_rank, count - 1 - pp_rank]
        return list(range(pp_rank, count, self.pp))

    def units_of(self, pp_rank: int) -> dict[str, NamedShapes]:
        """Return all FSDP units of a pipeline rank."""
        units: dict[str, NamedShapes] = {}
        for stage in self.stages_of(pp_rank):
            units |= self.stages[stage]
        return units

    def pieces_of(self, pp_rank: int, rank: int = 0) -> dict[str, Shape]:
        """Return an FSDP rank's pieces of a pipeline rank's parameters."""
        pieces: dict[str, Shape] = {}
        for unit in self.units_of(pp_rank).values():
            pieces |= {name: self.piece(name, rank) for name in unit}
        return pieces


def unit_of(name: str) -> str:
    """Return the FSDP unit of a module or parameter."""
    first, *others = name.split(".")
    units = {"tok_embeddings": "embedding", "norm": "root", "output": "head"}
    return f"block {others[0]}" if first == "layers" else units[first]


def blocks_of(units: Mapping[str, NamedShapes]) -> list[int]:
    """Return the places in the model of the decoder blocks among units."""
    return [int(name.split()[1]) for name in units if name.startswith("block")]


def elements(shapes: NamedShapes) -> int:
    """Return the numbers in tensors together."""
    return sum(map(prod, shapes.values()))


def read_run(config: Any, world: int) -> Run:
    """Return the run of a checked configuration."""
    args = llama_args(config)
    if args is None:
        raise ConfigError("model.name", config.model.name, "a model of this package")
    degree = config.parallelism.tensor_parallel_degree
    return Run(config, world, args, tp_settings(config, args, degree))
