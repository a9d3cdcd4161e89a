# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's configuration, tables and trainer."""

import ast
import importlib
import importlib.util
import inspect
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.compat.doors import changed
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
    assert found | {"torchtitan.tools.utils"} == set(device.DEVICE_HOLDERS), changed(
        f"modules that bind the device: {found}", "device.DEVICE_HOLDERS"
    )


def test_trainer_peaks_are_asked_where_they_are_replaced():
    import torchtitan.components.metrics as metrics

    want = changed("utils.get_peak_flops", "device.bind_device")
    assert "utils.get_peak_flops(" in inspect.getsource(metrics), want
    assert device.known_peak_flops("no such device") == device.UNKNOWN_PEAK, want


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


FAULTS = """
import resource
import torch
from torchtitan_lr.titan.device import keep_freed_memory

keep_freed_memory()
for turn in range(20):
    if turn == 12:  # glibc first puts chunks of the alignment's remainder aside
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Allocates and frees 16 MiB again and again; prints the page faults of the last eight."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators")
@pytest.mark.nightly
@pytest.mark.parametrize("own", [False, True])
def test_freed_memory_is_used_again(own: bool) -> None:
    """Except where the user decides."""
    variables = {"MALLOC_TRIM_THRESHOLD_": "131072"} if own else {}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=clean | variables, capture_output=True, check=True)
    pages = 8 * 2**24 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) > pages / 2) == own
    assert own or int(done.stdout) < pages / 50
