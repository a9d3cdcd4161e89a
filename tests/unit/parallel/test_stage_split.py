# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Which modules a stage holds."""

from types import SimpleNamespace

import pytest

from torchtitan_lr.parallel.stage_split import layers_before_boundaries, modules_per_stage


def job(schedule="1F1B", degree=2, per_stage=None, first=1, last=1, names=None):
    section = SimpleNamespace(
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_degree=degree,
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
        module_fqns_per_model_part=names,
    )
    return SimpleNamespace(parallelism=section)


@pytest.mark.parametrize(
    ("config", "layers", "before"),
    [
        (job(), 4, [2]),
        (job(degree=4), 4, [1, 3, 4]),  # the last stage has the head alone
        (job(degree=4, first=0, last=0), 4, [1, 2, 3]),
        (job("Interleaved1F1B"), 8, [2, 5, 7]),
        (job("ZBVZeroBubble"), 8, [2, 5, 7]),
        (job("Interleaved1F1B", per_stage=2), 10, [1, 3, 5, 7, 9]),
    ],
)
def test_blocks_before_each_boundary(config, layers, before):
    assert layers_before_boundaries(config, layers) == before
    names = [name for stage in modules_per_stage(config, layers) for name in stage]
    blocks = [f"layers.{i}" for i in range(layers)]
    assert names == ["tok_embeddings", *blocks, "norm", "output"]
