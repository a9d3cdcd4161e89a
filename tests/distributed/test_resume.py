# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An interrupted run goes on as if nothing had happened, at any data-parallel size."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints.record import read_step

OPTIONS = [
    "--model.name=llama_lax",
    "--training.steps=6",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--validation.enable",
    "--validation.steps=1",
    "--validation.seq_len=16",
    "--validation.freq=3",
]
FSDP2 = [*OPTIONS, "--training.local_batch_size=4"]


@pytest.fixture(scope="module")
def undisturbed(two_ranks: RankPool) -> dict[str, Any]:
    return two_ranks.run(train, FSDP2)[0]


@pytest.fixture(scope="module")
def stopped_run(two_ranks: RankPool) -> Path:
    """A run that a signal stopped after step 3."""
    return Path(two_ranks.run(train, FSDP2, "sigterm@3")[0]["dump_folder"])


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(stopped_run, tmp_path / "run"))


def test_a_validation_cut_off_is_made_up_for_once(
    two_ranks: RankPool, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(shutil.copytree(undisturbed["dump_folder"], tmp_path / "run"))
    history = Path(folder) / "metrics.jsonl"
    whole = history.read_text()
    # What a kill between the last save and the last validation leaves.
    lines = whole.splitlines(keepends=True)
    assert "validation_metrics/loss" in lines[-1]
    history.write_text("".join(lines[:-1]))
    for _ in range(2):
        resumed = two_ranks.run(train, FSDP2, "", folder)[0]
        assert resumed["val_losses"] == undisturbed["val_losses"]
        assert len(history.read_text().splitlines()) == len(lines)


def files_of(folder: str) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def test_a_refused_resume_changes_no_file(stopped: str, two_ranks: RankPool) -> None:
    torn = Path(stopped) / "checkpoint/step-4"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"torn")
    before = files_of(stopped)
    assert f"{stopped}/job_config.json" in before
    options = [*FSDP2, "--training.shuffle_seed=5", "--metrics.enable_tensorboard"]
    line = "training.shuffle_seed: got 5, expected 0 as in .*step-3"
    for error in two_ranks.errors(train, options, "", stopped):
        assert re.search(f"ConfigError: {line}", error)
    assert files_of(stopped) == before
    # The control: the run that is not refused writes its record, curve and checkpoints.
    two_ranks.run(train, [*FSDP2, "--training.gc_freq=40"], "", stopped)
    changed = {path for path, text in files_of(stopped).items() if before.get(path) != text}
    assert {f"{stopped}/job_config.json", f"{stopped}/metrics.jsonl"} <= changed
    assert not torn.exists() or (torn / ".metadata").is_file()


def test_a_torn_first_checkpoint_does_not_hide_the_initial_one(
    two_ranks: RankPool, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint/step-1").mkdir(parents=True)
    (tmp_path / "checkpoint/step-1/__0_0.distcp").write_bytes(b"torn")
    source = Path(undisturbed["dump_folder"]) / "checkpoint/step-6"
    options = [*FSDP2, f"--checkpoint.initial_load_path={source}", "--training.steps=1"]
    run = two_ranks.run(train, options, "", str(tmp_path))[0]
    # A trained model's first loss, on the first batch: below a fresh one's.
    assert run["losses"][0] < undisturbed["losses"][0] - 0.05


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_hugging_faces_format_has_a_record_too(two_ranks: RankPool) -> None:
    saves = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.last_save_model_only"]
    options = ["--model.name=llama_full", "--training.local_batch_size=4", *saves]
    in_hf = [*options, "--checkpoint.last_save_in_hf"]
    run = two_ranks.run(train, in_hf)[0]
    step = Path(run["dump_folder"]) / "checkpoint/step-2"
    record = read_step(step)
    files = {path.name for path in step.iterdir() if path.is_file()}
    assert files == {*record.files, "step.json"} and len(files) == 3
    assert [*record.states] == ["model"]
    # It starts a run, and resumes none.
    start = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={step}"]
    assert two_ranks.run(train, [*options, *start])[0]["losses"][0] < run["losses"][0]
    for error in two_ranks.errors(train, in_hf, "", run["dump_folder"]):
        assert "step-2', expected one with train_state: it holds model; " in error
        assert "checkpoint.load_step = 1 goes back to the step before" in error
    flip(step / "model-00001-of-00001.safetensors")
    for error in two_ranks.errors(train, [*options, *start]):
        assert "model-00001-of-00001.safetensors has another checksum" in error.splitlines()[-1]
