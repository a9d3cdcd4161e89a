# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import json

import pytest
import torch

from scripts.check import bench_block

SMALL = "--device cpu --flavor debug --ranks 2 --batch 1 --seq_len 16 --dtype float32 --steps 2"


def test_every_variant_is_timed(capsys):
    assert bench_block.main([*SMALL.split(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["variants"].keys() == bench_block.VARIANTS.keys()
    assert report["matmul_tflops"] > 0
    for row in report["variants"].values():
        assert row["forward_ms"] > 0 and row["forward_backward_ms"] > 0 and row["tflops"] > 0


def test_a_selection_as_a_table(capsys):
    assert bench_block.main([*SMALL.split(), "--only", "btp_c"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["btp_column"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_skips_with_a_reason(capsys):
    assert bench_block.main([]) == 0
    assert capsys.readouterr().out.startswith("skipped: no CUDA device here")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--flavor", "2B"], "invalid choice: '2B'"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--only", "mega"], "--only must begin one of full"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(wrong, told, capsys):
    with pytest.raises(SystemExit) as stop:
        bench_block.main(wrong)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and told in error and error.count("\n") == 1


def test_a_degree_that_does_not_divide_is_refused(capsys):
    assert bench_block.main([*SMALL.split(), "--ranks", "3", "--only", "btp"]) == 2
    assert "parallelism.tensor_parallel_degree: got 3" in capsys.readouterr().err
