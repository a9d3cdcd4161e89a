# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Stages and schedules of a pipeline."""

import ast
import inspect

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
    assert found == [(4, ["group"])]


def test_pipelining_builds_our_stages():
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    upstream = titan_pipeline.PipelineStage
    with stages_built_by(lambda part, index, *_, group: (part, index, group)):
        assert titan_pipeline.PipelineStage("part", 3, 4, "cpu", group="pp") == ("part", 3, "pp")
    assert titan_pipeline.PipelineStage is upstream
