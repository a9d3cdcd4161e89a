# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whether the passes of a run can be one CUDA graph, by its configuration."""

from typing import Any

from torchtitan_lr.optim.entries import ENTRIES


def why_eager(config: Any, world_size: int, device_type: str) -> str:
    """Return why a run's passes cannot be captured, as a remedy needs it; empty if they can."""
    parallelism, checkpointing = config.parallelism, config.activation_checkpoint
    draws = checkpointing.preserve_rng_state and checkpointing.mode not in ("none", "low_rank")
    own_sums = ENTRIES[config.optimizer.name].sums_replicas and world_size > 1
    reasons = {
        "training.step_graph is 'off'": config.training.step_graph == "off",
        f"CUDA graphs need a GPU, and this is a run on {device_type}": device_type != "cuda",
        "the host runs a pipeline's schedule": parallelism.pipeline_parallel_degree > 1,
        "a gradient codec reads sizes on the host": config.grad_compression.codec != "none",
        "training.enable_cpu_offload copies through the host": config.training.enable_cpu_offload,
        "training.mask_documents makes another mask in each step": config.training.mask_documents,
        "optimizer.tsr_overlap_buckets > 1 starts sums that end behind backward": (
            own_sums and config.optimizer.tsr_overlap_buckets > 1
        ),
        "optimizer.tsr_stagger finds new bases in nearly every step": config.optimizer.tsr_stagger,
        "activation_checkpoint.preserve_rng_state reads the random numbers' state": draws,
        "fsdp_reshard_after_forward = 'always' waits for an event of another stream": (
            parallelism.fsdp_reshard_after_forward == "always"
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
