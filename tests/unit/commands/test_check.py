# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``check``: what it runs, and what it refuses before a device is there."""

import pytest

from tests.commands import Command
from tests.support.corpora import write_corpus
from tests.support.nightly import nightly
from torchtitan_lr.checks import values
from torchtitan_lr.launch.run_folder import locked

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
    "debug_svd": [*stages("ZBVZeroBubble"), "--compile.no_enable"],
    "debug_caat": [],
    "debug_lax": [f"{P}context_parallel_degree=2", "--training.mixed_precision_param=bfloat16"],
    "debug_tsr": [],
}
OTHERS = [("debug_full", stages("Interleaved1F1B")), ("debug_tagc", [])]
OTHERS.append(("spectron_130m", ["--training.dataset=cpython", f"{P}tensor_parallel_degree=2"]))


@pytest.fixture(scope="module")
def check():
    return Command("check")


@pytest.mark.parametrize(("name", "options"), [*RUNS.items(), *nightly(*OTHERS)])
def test_a_pass_runs_without_devices(check, name, options, capsys, tmp_path):
    few = FEW if name.startswith("debug") else FEW[:1] + FEW[3:]
    own = [
        f"--job.dump_folder={tmp_path / 'run'}",
        f"--training.token_folder={tmp_path / 'tokens'}",
    ]
    assert check.main([name, "--world=8", *few, *options, *own]) == 0
    said = "8 ranks: checked, but for tokens, which are not prepared; a pass runs as a rank of "
    assert said in capsys.readouterr().out
    assert not any(tmp_path.iterdir())  # nothing is written


def test_what_train_would_refuse_is_refused(check, monkeypatch, capsys, tmp_path):
    """Files that are not there, tokens that do not fit, a folder of another run; and a pass."""
    from torchtitan_lr.models import llama

    monkeypatch.chdir(tmp_path)  # the clone's outputs/ may have a run of debug_cola

    def refused(*options, key):
        said = check.refusal(capsys, "debug_cola", *options)
        assert said.startswith(f"error: {key}: ")
        return said

    world = "--world=4"
    corpus = ["--training.dataset=prepared", f"--training.dataset_path={tmp_path}/corpus"]
    write_corpus(tmp_path / "corpus", [[[1] * 900]], [[[4095] * 900]])
    assert check.main(["debug_cola", world, *corpus]) == 0
    assert "4 ranks: checked; a pass runs as a rank of 1 stage\n" in capsys.readouterr().out
    write_corpus(tmp_path / "corpus", [[[1] * 900]], [[[4096] * 900]])
    missing = ["--training.dataset=local", "--training.dataset_path=/nonexistent"]
    refused(world, *missing, key="training.dataset_path")
    refused(world, "--model.hf_assets_path=/nonexistent", key="model.hf_assets_path")
    assert "4096" in refused(world, *corpus, key="training.dataset_path")
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    with locked(str(tmp_path / "run")):
        for options in ([world], []):
            assert "no other job uses" in refused(*options, folder, key="job.dump_folder")
    monkeypatch.setenv("LOG_RANK", "4")
    refused(key="LOG_RANK")
    monkeypatch.delenv("LOG_RANK")
    monkeypatch.setenv("NGPU", "3")
    refused(key="parallelism.tensor_parallel_degree")
    monkeypatch.setenv("NGPU", "4")
    monkeypatch.setattr(values, "machine_memory", lambda: 3 << 29)
    large = "--training.local_batch_size=64", "--training.global_batch_size=-1"
    assert "this machine has 1.5" in refused(*large, key="training.local_batch_size")

    def broken(self, *args, **kwargs):
        raise RuntimeError("these shapes do not fit\nand more")

    monkeypatch.setattr(llama.LlamaModel, "forward", broken)
    out = check.refusal(capsys, "debug_cola", "--world=4")
    assert "rank 0 of 4" in out and "these shapes do not fit" in out and "and more" not in out
