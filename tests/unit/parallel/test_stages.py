# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pipelines: what a stage holds, and what it sends for a token, in closed form."""

from types import SimpleNamespace

import pytest

from torchtitan_lr.parallel.stage_split import layers_before_boundaries, modules_per_stage


@pytest.mark.parametrize(
    ("schedule", "degree", "per_stage", "ends", "layers", "before"),
    [
        ("1F1B", 2, None, 1, 4, [2]),
        ("1F1B", 4, None, 1, 4, [1, 3, 4]),  # the last stage has the head alone
        ("1F1B", 4, None, 0, 4, [1, 2, 3]),
        ("Interleaved1F1B", 2, None, 1, 8, [2, 5, 7]),
        ("ZBVZeroBubble", 2, None, 1, 8, [2, 5, 7]),
        ("Interleaved1F1B", 2, 2, 1, 10, [1, 3, 5, 7, 9]),
    ],
)
def test_blocks_before_each_boundary(schedule, degree, per_stage, ends, layers, before):
    section = SimpleNamespace(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_degree=degree,
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=ends,
        pipeline_parallel_last_stage_less_layers=ends,
        module_fqns_per_model_part=None,
    )
    config = SimpleNamespace(parallelism=section)
    assert layers_before_boundaries(config, layers) == before
    names = [name for stage in modules_per_stage(config, layers) for name in stage]
    blocks = [f"layers.{i}" for i in range(layers)]
    assert names == ["tok_embeddings", *blocks, "norm", "output"]
