# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts.bench.gpu``: parity of every family, and a rehearsal of its parts on the CPU."""

import json

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from scripts.bench import gpu
from torchtitan_lr.models.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_fp64(family, device):
    for precision in ("bfloat16", "tf32" if device.type == "cuda" else "float32"):
        errors = gpu.parity_errors(family, precision, device.type)
        assert errors["gradient"] < gpu.LIMITS[precision]
        assert errors["loss"] < gpu.LIMITS[precision]


@pytest.mark.parametrize(("part", "key"), [("block", "speed_up"), ("context", "over_a_share")])
def test_parts_of_one_rank(part, key, tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device=cpu", "--small", f"--parts={part}", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["parts"][part]
    found = [row for row in rows if "kernel" not in row or key in row]
    assert found and all(row[key] > 0 for row in found)


def test_only_kernels_count_as_kernels():
    def event(key, device_type, is_user_annotation=False):
        found = FunctionEventAvg()
        found.key, found.device_type, found.count = key, device_type, 2
        found.is_user_annotation = is_user_annotation
        found.self_device_time_total, found.self_cpu_time_total = 500.0, 300.0
        return found

    events = [
        event("gemm", DeviceType.CUDA),
        event("cudaLaunchKernel", DeviceType.CPU),
        event("Optimizer.step", DeviceType.CUDA, is_user_annotation=True),
    ]
    assert [*gpu._on_device(events, cuda=True)] == [{"kernel": "gemm", "calls": 2, "ms": 0.5}]
    (on_cpu,) = gpu._on_device(events, cuda=False)
    assert on_cpu["kernel"] == "cudaLaunchKernel" and on_cpu["ms"] == 0.3


def test_a_rehearsal_of_the_spectral_part(tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device=cpu", "--small", "--parts=spectral", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["parts"]["spectral"]
    assert {"AdamW", "Muon", "Spectron", "LoRAMuon"} < {row["optimizer"] for row in rows}
    assert all(row["ms"] > 0 for row in rows)


def test_a_rehearsal_of_split_attention(device):
    rows = [*gpu.split("cpu", small=True)]
    assert [row for row in rows if "failed" in row] == []
    errors = [row["errors"] for row in rows if row["errors"] is not None]
    assert len(errors) == 2 and max(map(max, errors)) < 1e-6


@pytest.mark.parametrize("part", ["parity", "optimizer"])
def test_a_part_that_fails_leaves_no_precision_to_the_next(part, monkeypatch):
    def fail(*_, **__):
        assert torch.get_float32_matmul_precision() == now
        raise RuntimeError("out of memory")

    before, now = torch.get_float32_matmul_precision(), "high"
    monkeypatch.setattr(gpu, "median_ms", fail)
    monkeypatch.setattr(gpu, "LlamaModel", gpu.LlamaModel if part == "optimizer" else fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        if part == "optimizer":
            next(gpu.optimizer("cpu", small=True))
        else:
            gpu.parity_errors("cola", "tf32", "cpu")
    assert torch.get_float32_matmul_precision() == before != now


def test_a_rehearsal(tmp_path, request):
    if not request.config.getoption("--full"):
        pytest.skip("it compiles two models: run with --full")
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device=cpu", "--small", f"--out={out}"]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(gpu.PARTS) and all(parts.values())
    assert all(row["ms"] > 0 for row in parts["training"] + parts["optimizer"] + parts["codec"])
