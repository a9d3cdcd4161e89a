# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data parallelism with summed gradients: FSDP2, HSDP and replication.

The trainer divides the loss by the valid tokens of the *global* batch, so every wrapper is set to
sum. `round_on_the_wire` says in which dtypes gradients are summed and sent. Over the replicas they
are summed by FSDP2, by a codec (TAGC), by an optimizer that sends less than them (TSR-Adam), or by
nothing, where replicas train apart between outer steps.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compat.fsdp import (
    Norms,
    ReplicateModule,
    ranks_of,
    replicate,
    send_in,
    spare_copies,
    watch_gradients,
)
from torchtitan_lr.compression.settings import compression_settings
from torchtitan_lr.compression.units import COMPRESSORS, apply_gradient_compression
from torchtitan_lr.models.linears import LowRankLinear
from torchtitan_lr.optim.containers import REPLICAS_WIRE
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, JobConfig, ParallelDims, mesh_of


def apply_data_parallel(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Apply FSDP2, HSDP, replication or nothing, according to the data-parallel degrees."""
    training, shards = job_config.training, parallel_dims.fsdp_enabled
    replicates = parallel_dims.dp_replicate_enabled
    compresses = job_config.grad_compression.codec != "none"
    # FSDP2 must not sum over the replicas if an optimizer does, or nobody.
    others_sum = ENTRIES[job_config.optimizer.name].sums_replicas or job_config.outer.every > 0
    apart = replicates and others_sum
    # Mixed precision means the same in every layout, so that a model without data parallelism is
    # wrapped too.
    casts = not parallel_dims.dp_enabled and training.mixed_precision_param != training.dtype
    mesh = None  # of the ranks over which FSDP2 sums
    if shards or apart:
        mesh = mesh_of(parallel_dims, "fsdp")  # of size 1 under pure replication
        if replicates and not (apart or compresses):
            mesh = parallel_dims.get_mesh(["dp_replicate", "fsdp"])
        shard_units(model, mesh, parallel_dims, job_config)
    elif replicates or casts:
        # Not torchtitan's DDP path: it averages gradients of a loss that is already divided, which
        # are then too small by a factor of the number of replicas.
        mesh = mesh_of(parallel_dims, "dp_replicate")
        for unit in (*units_of(model), model):
            replicate(unit, mesh=mesh, mp_policy=mixed_precision_policy(job_config))
    sum_gradients(model)
    if mesh is not None:
        logger.info("Gradients are summed over %s", mesh)
    if compresses:
        compress_gradients(model, parallel_dims, job_config)
    if training.mixed_precision_reduce == "bfloat16":
        if apart:
            REPLICAS_WIRE[model] = torch.bfloat16
        if mesh is not None and mesh.size() > 1:
            round_on_the_wire(model)


def compress_gradients(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Exchange gradients by a codec over the slower links: between hosts, if there are several."""
    if not parallel_dims.fsdp_enabled:
        logger.info("Gradient compression: nothing to exchange without FSDP")
        return
    crosses_hosts = parallel_dims.dp_replicate_enabled
    slower = parallel_dims.get_mesh("dp_replicate" if crosses_hosts else "fsdp")
    settings = compression_settings(job_config, slower.size())
    apply_gradient_compression(model, slower, settings, all_reduce=crosses_hosts)


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return what FSDP2 gathers at a time, in the order of forward, but for the last norm."""
    # Unlike upstream, the norm and the head are not one unit. A tensor-parallel head does not call
    # the norm as a module, so the unit's forward would not finish and its weights would be stale.
    parts = [model.tok_embeddings, *model.get_submodule("layers").children(), model.output]
    return [cast(nn.Module, part) for part in parts if part is not None]


def shard_units(
    model: nn.Module, mesh: DeviceMesh, parallel_dims: ParallelDims, job_config: JobConfig
) -> None:
    """Apply FSDP2 to the units and to the rest of the model."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed_precision_policy(job_config)}
    if job_config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if ENTRIES[job_config.optimizer.name].splits_columns:
        options["shard_placement_fn"] = split_outside_rank(model, mesh.shape[-1])
    # On a mesh of size 1 nothing is sharded: a second all-gather would only copy.
    reshards = mesh.size() > 1 and reshard_after_forward(job_config, parallel_dims.pp_enabled)
    # Backward needs the head first: resharding it would only cause another all-gather.
    always = job_config.parallelism.fsdp_reshard_after_forward == "always"
    units = units_of(model)
    for unit in (*units, model):
        after = always if unit is model.output else reshards
        fully_shard(unit, reshard_after_forward=after, **options)
    if parallel_dims.fsdp_enabled:
        # FSDP2 alone starts a unit's gather when its forward begins. It then runs beside the unit
        # before only as far as the host is ahead of the device, which it is not where kernels are
        # small. A rank holds the gathered weights of two units either way.
        for unit, following in pairwise(units):
            next_units = [cast(FSDPModule, following)]
            cast(FSDPModule, unit).set_modules_to_forward_prefetch(next_units)


def split_outside_rank(model: nn.Module, ranks: int) -> Callable[[nn.Parameter], Shard]:
    """Choose the dimensions in which FSDP2 splits weights whose Gram matrices are summed."""
    # A spectral optimizer sums Gram matrices (r, r) over the ranks, for which no rank may hold a
    # part of r. So A (r, d_in) is split along d_in, not along the first dimension as FSDP2 does.
    # If tensor parallelism splits r already, or if the ranks do not divide the columns, which FSDP2
    # refuses, FSDP2's choice stays and the factor is gathered.
    by_columns: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            weight = module.A.weight
            rows, columns = local_part(weight).shape
            if rows == len(weight) and columns % ranks == 0:
                by_columns.add(weight)
    return lambda parameter: Shard(int(parameter in by_columns))


def mixed_precision_policy(job_config: JobConfig) -> MixedPrecisionPolicy:
    """Return FSDP2's precision policy for ``[training]``: it casts parameters only."""
    # `round_on_the_wire` says what is summed in its ``reduce_dtype``, and what is not.
    param_dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    # The embedding's output has their dtype, and so have all activations after it. A cast of a
    # block's arguments would change nothing but the rotary table, which it would round.
    return MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=torch.promote_types(param_dtype, torch.float32),
        cast_forward_inputs=False,
    )


def reshard_after_forward(job_config: JobConfig, pp_enabled: bool) -> bool:
    """Return FSDP2's resharding choice for ``parallelism.fsdp_reshard_after_forward``."""
    # A pipeline keeps weights gathered: otherwise every micro-batch would gather them again.
    policy = job_config.parallelism.fsdp_reshard_after_forward
    return policy == "always" or (policy == "default" and not pp_enabled)


def sum_gradients(model: nn.Module) -> None:
    """Set every FSDP2 or replicated module to reduce gradients by a plain sum."""
    for module in fsdp_modules([model]):
        # No division, and no ``AVG`` or ``PREMUL_SUM``, which gloo computes incorrectly or lacks.
        if ranks_of(module) > 1:  # a single one would pass over all gradients to divide by 1.0
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        spare_copies(module)


def round_on_the_wire(model: nn.Module) -> None:
    """Let every FSDP2 or replicated module send its gradients in bf16, the wire's dtype.

    What ranks sum is in the wire's dtype, ``training.mixed_precision_reduce``. Micro-batches are
    added up in fp32, but under 1. in ``training.dtype``, that of the stored gradients:

    1. FSDP2 casts each micro-batch's gradient to the wire's dtype, sums it over the shards in that
       dtype, and adds the sum to the stored gradient.
    2. HSDP does the same within the shards; behind the last micro-batch it rounds the fp32 total to
       the wire's dtype once, and sums it over the replicas in that dtype.
    3. Replication adds whole gradients up in fp32, and casts and sums the total over the replicas.
    4. A codec of TAGC gets an fp32 total, rounds what it sends itself and keeps the rest in its
       residual; owners add in fp32. HSDP's shards are summed before it, in the wire's dtype.
    5. TSR-Adam gets FSDP2's sums of the shards, projects them and adds cores up in fp32, and casts
       and sums cores and dense gradients over the replicas once.

    Reducing each micro-batch, or each round of a pipeline, over the replicas by itself would round
    each, and send the bytes as often. It would also feed a codec's residual back within a step, and
    refresh TSR-Adam's bases from a part of the gradient.
    """
    for module in fsdp_modules([model]):
        compressor = COMPRESSORS.get(module)
        # A codec gets unrounded gradients, and keeps what it rounds off in its residual.
        if compressor is None or not compressor.takes_gradients:
            send_in(module, torch.bfloat16)


def synchronize_gradients(model_parts: Sequence[nn.Module], enabled: bool) -> None:
    """Enable or disable the part of gradient synchronization that accumulation can defer."""
    # Only the last micro-batch needs an exchange over the replicas. FSDP still reduce-scatters each
    # micro-batch: unsharded gradients would cost the memory that sharding saves. With gradient
    # compression it keeps them: an exchange costs time, and its residual has the same size.
    for module in fsdp_modules(model_parts):
        if isinstance(module, ReplicateModule) or module in COMPRESSORS:
            module.set_requires_gradient_sync(enabled, recurse=False)
        else:
            module.set_requires_gradient_sync(True, recurse=False)  # a pipeline disables it
            module.set_requires_all_reduce(enabled, recurse=False)


@contextmanager
def own_norms(model_parts: Collection[nn.Module]) -> Iterator[Norms]:
    """Note the norms of this rank's own gradients, before they are summed."""
    norms: Norms = []
    for module in fsdp_modules(model_parts):
        watch_gradients(module, norms)
    try:
        yield norms
    finally:
        for module in fsdp_modules(model_parts):
            watch_gradients(module, None)


def nonfinite(norms: Norms, part: nn.Module) -> list[str]:
    """Return the names of a part's parameters of which a norm is not finite."""
    spoilt: set[Tensor] = set()
    for parameters, found in norms:
        finite = found.isfinite().tolist()
        spoilt.update(p for p, fine in zip(parameters, finite, strict=True) if not fine)
    return [clean_name(name) for name, p in part.named_parameters() if p in spoilt]


def fsdp_modules(model_parts: Iterable[nn.Module]) -> list[FSDPModule]:
    """Return every FSDP2-managed module, replicated ones included."""
    return [m for part in model_parts for m in part.modules() if isinstance(m, FSDPModule)]
