# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Layouts of up to four ranks, for comparing runs from the same weights."""

FAMILIES = ("full", "svd", "cola", "lax")


def degrees(tensor: int = 1, pipeline: int = 1, local_batch: int = 8) -> list[str]:
    """Return arguments for degrees; FSDP2 takes the ranks that are left.

    A pipeline gets at most four micro-batches, as many as the deepest one has stages.
    """
    arguments = [
        f"--parallelism.tensor_parallel_degree={tensor}",
        f"--parallelism.pipeline_parallel_degree={pipeline}",
        f"--training.local_batch_size={local_batch}",
    ]
    size = max(1, local_batch // 4) if pipeline > 1 else 1
    return [*arguments, f"--parallelism.pipeline_parallel_microbatch_size={size}"]


DEEP = ["--model.flavor=parity4"]
"""Enough layers for four stages."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp1": (1, degrees()),
    "tp2": (2, degrees(tensor=2)),
    "pp2": (2, degrees(pipeline=2)),
    "tp4": (4, degrees(tensor=4)),
    "pp4": (4, [*degrees(pipeline=4), *DEEP]),
    "pp2_tp2": (4, degrees(tensor=2, pipeline=2)),
    "fsdp2_tp2": (4, degrees(tensor=2, local_batch=4)),
    "fsdp2_pp2": (4, degrees(pipeline=2, local_batch=4)),
}
"""Number of ranks and arguments, by name; the global batch is always the same."""


def model(family: str) -> list[str]:
    """Return the argument that chooses a family."""
    return [f"--model.name=llama_{family}"]


def schedule(name: str) -> list[str]:
    """Return the arguments that choose a pipeline schedule, and a model of as many stages."""
    deep = DEEP if name in ("Interleaved1F1B", "ZBVZeroBubble") else []
    return [f"--parallelism.pipeline_parallel_schedule={name}", *deep]


def flavor(options: list[str]) -> list[str]:
    """Return the last flavor that options choose, for their reference."""
    return [option for option in options if option.startswith("--model.flavor=")][-1:]
