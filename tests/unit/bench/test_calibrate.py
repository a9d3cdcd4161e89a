# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts.bench.calibrate``: a rehearsal at tiny size, and the fit on times that are known."""

import math

import pytest

from scripts.bench import calibrate
from scripts.bench.calibrate import CACHED, fit_bandwidth, fit_speed
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.hardware import load_hardware
from torchtitan_lr.estimate.kernels import Product

TINY = ["--repeats=3", "--megabytes=0.1", "--length=16"]
SHAPES = ["--shapes", "512x512x512", "512x64x512", "128x256x64"]


def test_a_tiny_rehearsal(tmp_path, capsys):
    """The file it writes is a machine that `estimate` reads."""
    file = tmp_path / "here.toml"
    assert calibrate.main(["--out", str(file), *TINY, *SHAPES]) == 0
    machine = load_hardware(str(file))
    assert 0 < machine.matmul_efficiency <= 1 and math.isfinite(machine.memory_gbytes_per_s)
    assert machine.kernel_us > 0 and machine.attention_share > 0
    assert machine.product_gbytes_per_s > 0  # a CPU's own
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("128 x 256 x 64") for line in lines)


def timed(speed, memory, launch):
    products = [Product(1, m, n, k, 2) for m, n, k in ((512, 512, 512), (512, 64, 512), (99, 7, 3))]
    return {p: p.flops / speed + p.bytes / memory + launch for p in products}


def test_the_fit_finds_the_speed():
    times = timed(1e11, 1e10, 1e-6)
    assert fit_speed(times, 1e10, 1e-6) == pytest.approx(1e11)
    # The control: without the bytes the same times are those of a slower machine.
    assert fit_speed(times, math.inf, 1e-6) < 0.9e11
    with pytest.raises(ConfigError, match=r"--shapes: got '512x512x512 .*expected larger"):
        fit_speed(times, 1e6, 1.0)


def test_the_fit_finds_the_bandwidth_of_products():
    times = timed(1e11, 1e10, 1e-6)
    assert fit_bandwidth(times, 1e-6) == pytest.approx(1e10)
    # The control: launches that are left out count as bytes.
    assert fit_bandwidth(times, 0) < 0.9e10
    assert fit_bandwidth(timed(1e11, math.inf, 0), 0) == CACHED
    # Noise that leaves nothing for the FLOPs: the products still have a speed.
    largest, *rest = times
    noisy = {largest: largest.bytes / 2e10} | {p: p.bytes / 1e10 for p in rest}
    assert fit_bandwidth(noisy, 0) == CACHED and fit_speed(noisy, CACHED, 0) > 0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--out", "here"], "--out: got 'here', expected a name that ends in .toml"),
        (["--out", "a.toml", "--repeats=0"], "--repeats: got 0, expected at least 1"),
        (["--out", "a.toml", "--shapes", "4x4"], "--shapes"),
        ([], "--out"),
    ],
)
def test_refusals(wrong, told, capsys):
    try:
        status = calibrate.main(wrong)
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
