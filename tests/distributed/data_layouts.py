# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data-parallel layouts of four ranks with one global batch."""

LAYOUTS = {
    "fsdp4": ["--parallelism.data_parallel_shard_degree=4", "--training.local_batch_size=2"],
    "hsdp2x2": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--training.local_batch_size=2",
    ],
    "replicate4": [
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--training.local_batch_size=2",
    ],
    "fsdp4_accumulate2": [
        "--parallelism.data_parallel_shard_degree=4",
        "--training.local_batch_size=1",
    ],
    "hsdp2x2_accumulate2": [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--training.local_batch_size=1",
    ],
    "replicate4_accumulate2": [
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
        "--training.local_batch_size=1",
    ],
}
