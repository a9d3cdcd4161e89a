# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
import os
import platform
import subprocess
import sys

import pytest
import torch

from tests.support.nightly import nightly
from torchtitan_lr.training.device import CPU_DEVICE, peak_flops


def test_peak_memory_of_a_cpu_process_grows_with_what_it_touches() -> None:
    device = CPU_DEVICE
    before = device.memory_stats()["active_bytes.all.peak"]
    block = torch.ones(64 * 2**20 // 4 + before // 4)  # larger than anything so far
    after = device.memory_stats()["active_bytes.all.peak"]
    assert after - before > 32 * 2**20
    assert block.sum() > 0
    assert device.get_device_properties().total_memory >= after


def test_unknown_peaks_are_nan_and_known_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_lr.training.device.has_accelerator", lambda: True)
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    # torchtitan's own answer for this one is an A100's peak.
    assert math.isnan(peak_flops("Some Accelerator 9000"))


FAULTS = """
import resource
import torch
from torchtitan_lr.training.device import keep_freed_memory

keep_freed_memory()
for turn in range(20):
    if turn == 12:  # glibc first puts chunks of the alignment's remainder aside
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 22)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Allocates and frees 16 MiB again and again; prints the page faults of the last eight."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators")
@pytest.mark.parametrize("own", [False, *nightly(True)])
def test_freed_memory_is_used_again(own: bool) -> None:
    """Except where the user decides."""
    variables = {"MALLOC_TRIM_THRESHOLD_": "131072"} if own else {}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=clean | variables, capture_output=True, check=True)
    pages = 8 * 2**24 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) > pages / 2) == own
    assert own or int(done.stdout) < pages / 50
