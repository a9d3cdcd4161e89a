# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Stages and schedules of a pipeline."""

import ast
import inspect

import pytest
import torch

from tests.unit.compat.doors import changed
from torchtitan_lr.titan.specs import stages_built_by


def test_pipelining_the_arguments_of_a_stage():
    """torchtitan's one call of PipelineStage, as `stages_built_by` takes it."""
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(titan_pipeline)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PipelineStage"
    ]
    found = [(len(call.args), [keyword.arg for keyword in call.keywords]) for call in calls]
    assert found == [(4, ["group"])], changed("calls of PipelineStage", "titan/specs.py")


DEVICE, GROUP = torch.device("cpu"), object()


@pytest.fixture
def stage():
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    with stages_built_by(lambda *values: values, 4, DEVICE, GROUP):
        yield lambda *args, **named: titan_pipeline.PipelineStage(*args, **named)


def test_pipelining_a_known_stage_is_built(stage):
    assert stage("part", 3, 4, DEVICE, group=GROUP) == ("part", 3)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("part", 3, 4, DEVICE), {"group": GROUP, "dw_builder": None}),
        (("part", 3, 4, DEVICE, "more"), {"group": GROUP}),
        (("part", 3, 4, DEVICE), {}),
        (("part", 3, 4), {"group": GROUP, "device": DEVICE}),
    ],
)
def test_pipelining_an_unknown_argument_is_refused(stage, args, named):
    with pytest.raises(TypeError, match=r"PipelineStage .*torchtitan_lr\.titan\.specs"):
        stage(*args, **named)
