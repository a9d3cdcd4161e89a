# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Description of a run for estimates: model, plan, mesh, and modules of each pipeline rank."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchtitan_lr.compression.settings import CompressionSettings, compression_settings
from torchtitan_lr.costs.fsdp_messages import named_parameters, split_by_columns
from torchtitan_lr.costs.hardware import MeshDim
from torchtitan_lr.costs.held_memory import NamedShapes, Precision, Shape, sharded
from torchtitan_lr.costs.optimizer_costs import OptimizerCost
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import llama_args, model_shapes
from torchtitan_lr.optim.entries import ENTRIES, OptimizerEntry, imported
from torchtitan_lr.parallel.data_parallel import reshard_after_forward
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import tp_settings
from torchtitan_lr.parallel.stage_split import modules_per_stage
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP


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
        batches = self.microbatches * self.accumulation * self.shard * self.replicas
        self.tokens_per_step = self.tokens * batches  # on all ranks
        self.checkpointing: str = self.config.activation_checkpoint.mode

    @property
    def mesh(self) -> dict[str, MeshDim]:
        """Sizes and strides of the mesh dimensions, innermost first, in torchtitan's order."""
        sizes = {"tp": self.tp, "fsdp": self.shard, "dp_replicate": self.replicas, "pp": self.pp}
        mesh, stride = {}, 1
        for name, size in sizes.items():
            mesh[name] = MeshDim(size, stride)
            stride *= size
        # FSDP's dimension is torchtitan's dp_shard over cp, of which cp is the inner one.
        mesh["cp"] = MeshDim(self.cp, self.tp)
        mesh["fsdp_tp"] = MeshDim(self.shard * self.tp, 1)  # of r × r sums
        return mesh

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks by mesh dimension."""
        return {name: dim.size for name, dim in self.mesh.items()}

    @property
    def precision(self) -> Precision:
        """Bytes per element."""
        training = self.config.training
        # A codec gets gradients that are not rounded yet.
        takes_gradients = self.compresses and self.replicas == 1
        names = (
            training.dtype,
            training.mixed_precision_param,
            "float32" if takes_gradients else training.mixed_precision_reduce,
        )
        return Precision(*(TORCH_DTYPE_MAP[name].itemsize for name in names))

    @property
    def wire_dtypes(self) -> dict[str, str]:
        """Name of the dtype in which tensors are sent, by `Traffic.role`.

        Of an optimizer's sums over the replicas, ``stored`` are dense gradients, ``replicas`` the
        rest.
        """
        training = self.config.training
        reduced = training.mixed_precision_reduce
        computed = dict.fromkeys(("activation", "parameter"), training.mixed_precision_param)
        wide = dict.fromkeys(("statistic", "loss", "core", "sketch", "gram", "momentum"), "float32")
        return {
            **computed,
            **wide,
            "gradient": reduced,
            "stored": reduced if reduced == "bfloat16" else training.dtype,
            "replicas": reduced,
            "checksum": "int64",
            "index": "uint8",
        }

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 gathers weights again for backward."""
        return self.shard > 1 and reshard_after_forward(self.config, self.pp > 1)

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
    def by_columns(self) -> set[str]:
        """Names of the parameters that FSDP2 splits along their columns, and not their rows."""
        if not self.entry.splits_columns:
            return set()
        return split_by_columns(self.args, self.settings, self.tp, self.shard)

    def splits(self, name: str, local: Shape) -> list[tuple[str, ...]]:
        """Return the mesh dimensions that split each dimension of a matrix."""
        whole, splits = self.global_shapes[name], []
        for dim in (0, 1):
            by_fsdp = self.shard > 1 and dim == int(name in self.by_columns)
            names = ["fsdp"] if by_fsdp else []
            names += ["tp"] if local[dim] != whole[dim] else []
            splits.append(tuple(names))
        return splits

    def piece(self, name: str, shape: Shape) -> Shape:
        """Return the first FSDP rank's piece of a parameter."""
        return sharded(shape, self.shard, dim=int(name in self.by_columns))

    @cached_property
    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of the whole model."""
        return model_shapes(self.args)

    @cached_property
    def stages(self) -> list[dict[str, NamedShapes]]:
        """FSDP units of every pipeline stage: shapes on a tensor-parallel rank, by name."""
        units = named_parameters(self.args, self.settings, self.tp)
        if self.pp == 1:
            return [dict(units)]
        unit_of = {"tok_embeddings": "embedding", "norm": "root", "output": "head"}
        unit_of |= {f"layers.{i}": f"block {i}" for i in range(self.args.n_layers)}
        stages: list[dict[str, NamedShapes]] = []
        for names in modules_per_stage(self.config, self.args.n_layers):
            stages.append({unit_of[name]: units[unit_of[name]] for name in names})
        return stages

    @property
    def splits_backward(self) -> bool:
        """Whether stages compute the gradients of inputs first, and those of weights later."""
        return self.pp > 1 and (
            self.config.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
        )

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

    def pieces_of(self, pp_rank: int) -> dict[str, Shape]:
        """Return the first FSDP rank's pieces of a pipeline rank's parameters."""
        return {name: self.piece(name, shape) for name, shape in self.shapes_of(pp_rank).items()}

    def shapes_of(self, pp_rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a pipeline rank's parameters on a tensor-parallel rank."""
        shapes: dict[str, tuple[int, ...]] = {}
        for unit in self.units_of(pp_rank).values():
            shapes |= unit
        return shapes


def blocks_of(units: dict[str, NamedShapes]) -> int:
    """Count the decoder blocks among units."""
    return sum(name.startswith("block") for name in units)


def read_run(config: Any, world: int) -> Run:
    """Return the run of a checked configuration."""
    args = llama_args(config)
    if args is None:
        raise ConfigError("model.name", config.model.name, "a model of this package")
    degree = config.parallelism.tensor_parallel_degree
    return Run(config, world, args, tp_settings(config, args, degree))


def with_wire(run: Run, dtype: str) -> Run:
    """Return the run whose gradients travel in another dtype."""
    training = replace(run.config.training, mixed_precision_reduce=dtype)
    return replace(run, config=replace(run.config, training=training))
