# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's device on a CPU, peaks, and the stages of its pipelines."""

import ast
import inspect
import math
from pathlib import Path

import pytest
import torch
import torch.profiler
import torchtitan.components.metrics as titan_metrics
import torchtitan.distributed.pipeline_parallel as titan_pipeline
import torchtitan.tools.utils as titan_utils
from torchtitan.config import JobConfig

from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.titan import components, device
from torchtitan_lr.titan.specs import stages_built_by


@pytest.mark.skipif(device.has_accelerator(), reason="binds a CPU")
def test_every_loaded_module_of_torchtitan_gets_the_cpu() -> None:
    device.bind_device()
    holders = device.device_holders()
    assert {(titan_utils, "device_type"), (titan_metrics, "device_module")} <= set(holders)
    assert all(getattr(*each) in ("cpu", device.CPU_DEVICE) for each in holders)


def test_peak_memory_of_a_cpu_process_grows_with_what_it_touches() -> None:
    before = device.CPU_DEVICE.memory_stats()["active_bytes.all.peak"]
    block = torch.ones(64 * 2**20 // 4 + before // 4)  # larger than anything so far
    after = device.CPU_DEVICE.memory_stats()["active_bytes.all.peak"]
    assert after - before > 32 * 2**20
    assert block.sum() > 0
    assert device.CPU_DEVICE.get_device_properties().total_memory >= after


def test_unknown_peaks_are_nan_and_known_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    assert device.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert device.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    # torchtitan's own answer for this one is an A100's peak.
    assert math.isnan(device.peak_flops("Some Accelerator 9000"))


def test_a_run_that_is_profiled_leaves_torchs_profiler_as_it_is(tmp_path: Path) -> None:
    config, torchs = JobConfig(), torch.profiler.profile
    config.job.dump_folder, config.profiling.enable_profiling = str(tmp_path), True
    with fake_process_group(1), components.profilers(config, 0) as (times,):
        assert isinstance(times, torchs) and torch.profiler.profile is torchs


def test_pipelines_build_our_stages() -> None:
    """torchtitan's one call of PipelineStage has the arguments that `stages_built_by` takes."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(titan_pipeline)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PipelineStage"
    ]
    found = [(len(call.args), [keyword.arg for keyword in call.keywords]) for call in calls]
    assert found == [(4, ["group"])]
    upstream = titan_pipeline.PipelineStage
    with stages_built_by(lambda part, index, *_, group: (part, index, group)):
        assert titan_pipeline.PipelineStage("part", 3, 4, "cpu", group="pp") == ("part", 3, "pp")
    assert titan_pipeline.PipelineStage is upstream
