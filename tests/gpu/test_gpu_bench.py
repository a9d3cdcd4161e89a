# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts.bench.gpu``: parity of every family, and a rehearsal of its parts on the CPU."""

import json

import pytest

from scripts.bench import gpu
from torchtitan_lr.models.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_fp64(family, device):
    for precision in ("bfloat16", "tf32" if device.type == "cuda" else "float32"):
        errors = gpu.parity_errors(family, precision, device.type)
        assert errors["gradient"] < gpu.LIMITS[precision]
        assert errors["loss"] < gpu.LIMITS[precision]


@pytest.mark.nightly  # it compiles two models
def test_a_rehearsal(tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device=cpu", "--small", f"--out={out}"]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == list(gpu.PARTS) and all(parts.values())
    assert all(row["ms"] > 0 for row in parts["training"] + parts["optimizer"])
