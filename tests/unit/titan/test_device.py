# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's configuration, tables and trainer."""

import ast
import importlib
import importlib.util
import math
from pathlib import Path

import pytest
import torch

from torchtitan_lr.titan import device
from torchtitan_lr.titan.device import CPU_DEVICE, peak_flops


def test_trainer_every_holder_of_the_device_is_known():
    """Searched in the files of torchtitan that run with our models."""
    root = Path(importlib.util.find_spec("torchtitan").origin).parent
    folders = ("components", "config", "distributed", "protocols", "tools")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = {
        ".".join(("torchtitan", *path.relative_to(root).with_suffix("").parts))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "torchtitan.tools.utils"
        if {alias.name for alias in node.names} & {"device_type", "device_module"}
    }
    assert found | {"torchtitan.tools.utils"} == set(device.DEVICE_HOLDERS)


def test_peak_memory_of_a_cpu_process_grows_with_what_it_touches() -> None:
    device = CPU_DEVICE
    before = device.memory_stats()["active_bytes.all.peak"]
    block = torch.ones(64 * 2**20 // 4 + before // 4)  # larger than anything so far
    after = device.memory_stats()["active_bytes.all.peak"]
    assert after - before > 32 * 2**20
    assert block.sum() > 0
    assert device.get_device_properties().total_memory >= after


def test_unknown_peaks_are_nan_and_known_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lr.titan.device.has_accelerator", lambda: True)
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    # torchtitan's own answer for this one is an A100's peak.
    assert math.isnan(peak_flops("Some Accelerator 9000"))
