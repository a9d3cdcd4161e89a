# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs with TSR-Adam: its options, and layouts of four ranks."""

TSR = [
    "--training.steps=3",  # the third one with new bases of the embedding
    "--optimizer.name=TSRAdam",
    "--optimizer.tsr_rank=12",
    "--optimizer.tsr_refresh_interval=3",
    "--optimizer.tsr_embedding_rank=8",
    "--optimizer.tsr_embedding_refresh_interval=2",
]
BATCH = {n: [f"--training.local_batch_size={n}"] for n in (1, 2, 4, 8)}
REPLICATE4 = [
    "--parallelism.data_parallel_replicate_degree=4",
    "--parallelism.data_parallel_shard_degree=1",
]
HSDP = ["--parallelism.data_parallel_replicate_degree=2"]
TP2 = ["--parallelism.tensor_parallel_degree=2"]
LAYOUTS = {
    "replicate4": [*REPLICATE4, *BATCH[2]],
    "replicate4_accumulate2": [*REPLICATE4, *BATCH[1]],
    "hsdp2x2": [*HSDP, *BATCH[2]],
    "fsdp4": BATCH[2],
    "tp2xdp2": [*HSDP, *TP2, "--parallelism.data_parallel_shard_degree=1", *BATCH[2]],
    "fsdp2xtp2": [*TP2, *BATCH[4]],
    "pp2xdp2": [
        *("--parallelism.pipeline_parallel_degree=2", *HSDP, *BATCH[4]),
        "--parallelism.data_parallel_shard_degree=1",
    ],
}
