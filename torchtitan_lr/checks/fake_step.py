# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Forward and backward of a run's first pass as single ranks, on tensors without data."""

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from torchtitan_lr.compat.fake import FakeTensorMode, fake_process_group
from torchtitan_lr.compat.pipelining import without_vote
from torchtitan_lr.errors import ConfigError, describe_error
from torchtitan_lr.models.ends import build_loss
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.parallel.data_parallel import synchronize_gradients
from torchtitan_lr.titan.base import TORCH_DTYPE_MAP, ParallelDims, set_default_dtype
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.titan.specs import get_train_spec


def rehearse_ranks(config: Any, world: int) -> int:
    """Run the first pass as the first rank of every pipeline stage; return how many there are."""
    stages = config.parallelism.pipeline_parallel_degree
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        for rank in range(0, world, world // stages):
            try:
                rehearse_rank(_shortened(config), world, rank)
            except Exception as error:
                why = describe_error(error) or f"{type(error).__name__}: {error}"
                want = f"a pass that rank {rank} of {world} can run: {why.partition(chr(10))[0]}"
                raise ConfigError("CONFIG", config.job.config_file, want) from error
    finally:
        logging.disable(before)
    return stages


def _shortened(config: Any) -> Any:
    """Return a configuration with few micro-batches, nothing compiled, and without a codec."""
    # What a codec sends depends on the values of gradients.
    section, training = config.parallelism, config.training
    size, degree = section.pipeline_parallel_microbatch_size, section.pipeline_parallel_degree
    if degree > 1:
        rows = size * min(training.local_batch_size // size, 2 * degree)
        training = replace(training, local_batch_size=rows)
    training = replace(training, enable_cpu_offload=False)  # pinned memory needs a device
    return replace(
        config,
        training=training,
        compile=replace(config.compile, enable=False),
        grad_compression=replace(config.grad_compression, codec="none"),
    )


def rehearse_rank(config: Any, world: int, rank: int) -> None:
    """Build a rank's part of the model, parallel and with its optimizer, and run a micro-batch."""
    section, training = config.parallelism, config.training
    device, spec = torch.device(bind_device()), get_train_spec(config.model.name)
    dtype = set_default_dtype(TORCH_DTYPE_MAP[training.dtype])
    with warnings.catch_warnings(), fake_process_group(world, rank), without_vote(), dtype:
        warnings.simplefilter("ignore")  # of outputs that are views of fake tensors
        dims = ParallelDims(
            dp_replicate=section.data_parallel_replicate_degree,
            dp_shard=section.data_parallel_shard_degree,
            cp=section.context_parallel_degree,
            tp=section.tensor_parallel_degree,
            pp=section.pipeline_parallel_degree,
            ep=1,
            etp=1,
            world_size=world,
        )
        dims.build_mesh()
        args = spec.model_args[config.model.flavor]
        args.update_from_config(config)
        with torch.device("meta"):
            model = spec.model_cls(args)
        loss_of, pipeline = build_loss(config), None
        if dims.pp_enabled:
            assert spec.pipelining_fn is not None
            arguments = (dims, config, device, args, spec.parallelize_fn, loss_of)
            pipeline, parts, _, _ = spec.pipelining_fn(model, *arguments)
        else:
            parts = [spec.parallelize_fn(model, dims, config)]
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            for part in parts:
                part.to_empty(device=device)
        spec.build_optimizers_fn(parts, config.optimizer, dims)  # reads the ranks of the mesh
        shape = training.local_batch_size, training.seq_len // dims.cp
        with fake:
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            divisor = torch.ones((), device=device)
            synchronize_gradients(parts, True)
            more = loss_arguments(parts[0], tokens)
            if pipeline is not None:
                pipeline.is_last_round = True
                pipeline.forward_backward(tokens, tokens, divisor, **more)
            else:
                (loss_of(parts[0](tokens, **more), tokens) / divisor).backward()
