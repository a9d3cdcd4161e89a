# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command of the checkpoints' times: its table, and what it refuses before any rank starts."""

import pytest

from scripts.check import bench_checkpoint

ROW = {
    "step": 2.0,
    "pause": 0.25,
    "step_while_saving": 0.0,
    "on_disk": 4.0,
    "load": 3.0,
    "checkpoint": 8_000_000,
    "parts": [4_500_000, 3_400_000],
    "read": 16_800_000,
    "from_device": None,
}


def test_the_table():
    report = {"ranks": 2, "cores": 2, "load": 0.5, "modes": {"async": ROW}}
    head, names, row = bench_checkpoint.as_text(report).splitlines()
    assert head == "8.0 MB by 2 ranks (4.5, 3.4); 2 cores, load 0.5"
    assert names.split()[:3] == ["async_mode", "step", "pause"]
    assert row.split() == ["async", "2.000", "0.250", "-", "4.000", "3.000", "2.10x", "-"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--saves", "0"], "--saves: got 0, expected at least 1"),
        (["--modes", "async_with_pinned_mem"], "checkpoint.async_mode: got 'async_with_pinned"),
    ],
)
def test_refused_in_one_line(arguments, error, capsys):
    try:
        status = bench_checkpoint.main(["train_configs/debug_cola.toml", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if error in line] == printed[-1:]
