# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``check``: what it runs, and what it refuses before a device is there."""

import pytest

from tests.commands import Command

P = "--parallelism."
FEW = ["--training.seq_len=32", "--training.local_batch_size=4", "--training.global_batch_size=-1"]
FEW += ["--validation.seq_len=32"]


def stages(schedule, degree=2, tp=1):
    return [
        f"{P}pipeline_parallel_degree={degree}",
        f"{P}pipeline_parallel_schedule={schedule}",
        f"{P}pipeline_parallel_microbatch_size=1",
        f"{P}tensor_parallel_degree={tp}",
        f"{P}data_parallel_replicate_degree=1",
    ]


RUNS = {
    "debug_cola": stages("1F1B", tp=2),
    "debug_full": stages("Interleaved1F1B"),
    "debug_svd": [*stages("ZBVZeroBubble"), "--compile.no_enable"],
    "debug_caat": [],
    "debug_lax": [f"{P}context_parallel_degree=2", "--training.mixed_precision_param=bfloat16"],
    "debug_tsr": [],
    "debug_tagc": [],
    "spectron_130m": ["--training.dataset=cpython", f"{P}tensor_parallel_degree=2"],
}


@pytest.fixture(scope="module")
def check():
    return Command("check")


@pytest.mark.parametrize("name", RUNS)
def test_a_pass_runs_without_devices(check, name, capsys, tmp_path):
    few = FEW if name.startswith("debug") else FEW[:1] + FEW[3:]
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    assert check.main([name, "--world=8", *few, *RUNS[name], folder]) == 0
    assert "8 ranks: checked; a pass runs as a rank of" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()  # nothing is written


def test_what_would_fail_later_is_refused(check, monkeypatch, capsys):
    """A pass that raises, and a file that is not there."""
    from torchtitan_lr.models import llama

    missing = ["--training.dataset=local", "--training.dataset_path=/nonexistent"]
    assert check.main(["debug_cola", "--world=4", *missing]) == 2
    assert "training.dataset_path" in capsys.readouterr().err

    def broken(self, *args, **kwargs):
        raise RuntimeError("these shapes do not fit\nand more")

    monkeypatch.setattr(llama.LlamaModel, "forward", broken)
    assert check.main(["debug_cola", "--world=4"]) == 2
    out = capsys.readouterr().err
    assert "rank 0 of 4" in out and "these shapes do not fit" in out and "and more" not in out
