# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Whole runs of the trainer with compressed gradients: parity, metrics, resuming."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import small_trainer, train
from tests.support.nightly import nightly
from tests.support.parity_runs import EXACT, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.compression.units import compressors_of
from torchtitan_lr.training.history import HISTORY_FILE, read_history

# Enough tokens that the embedding's gradient has more entries than are sent.
FSDP4 = ["--model.name=llama_full", "--training.local_batch_size=2", "--training.seq_len=64"]
HSDP = ["--parallelism.data_parallel_replicate_degree=2"]
ACCUMULATE = ["--training.local_batch_size=1"]
EVERYTHING = ["--grad_compression.level=custom", "--grad_compression.theta=0"]
LEFT_OUT = {
    "sparse": ["--grad_compression.codec=sparse", *EVERYTHING],
    "sketch": ["--grad_compression.codec=sketch", *EVERYTHING, "--grad_compression.c=0.5"],
}
SKETCH = ["--grad_compression.codec=sketch", "--grad_compression.level=10x"]


@pytest.fixture(scope="module")
def plain(four_ranks: RankPool) -> dict[str, Any]:
    return four_ranks.run(train, FSDP4)[0]


@pytest.mark.parametrize(
    ("codec", "layout"),
    [
        ("sketch", HSDP),
        ("sparse", [*HSDP, *ACCUMULATE]),
        ("sketch", []),
        *nightly(("sparse", []), ("sparse", ACCUMULATE)),
    ],
)
def test_a_codec_that_sends_everything_trains_as_fsdp(
    codec: str, layout: list[str], four_ranks: RankPool, plain: dict[str, Any]
) -> None:
    run = four_ranks.run(train, [*FSDP4, *LEFT_OUT[codec], *layout])[0]
    assert largest_difference(run, plain) < EXACT


def history(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_history(Path(run["dump_folder"]) / HISTORY_FILE)


def test_metrics_tell_what_compression_did(four_ranks: RankPool) -> None:
    dense = [*FSDP4, "--training.steps=3", "--metrics.comm_ledger"]
    run = four_ranks.run(train, [*dense, *SKETCH], "", "", False)[0]  # bytes are those of fp32
    records = history(run)
    assert len(records) == 3
    for record in records:
        assert record["grad_compression/sparsity"] >= 0.9875
        assert record["grad_compression/sparsity"] < 0.99
        assert record["grad_compression/unpeeled_share"] < 0.01
    norms = [record["grad_compression/residual_norm"] for record in records]
    assert norms == sorted(norms) and norms[0] > 0  # it fills up in the first steps
    counted = four_ranks.run(train, dense, "", "", False)[0]
    difference = history(counted)[-1]["comm_bytes/fsdp"] - records[-1]["comm_bytes/fsdp"]
    assert difference == records[-1]["grad_compression/bytes_saved"]
    # The largest 1.25% are not everything: a codec that were never called would not show.
    assert largest_difference(run, counted) > 1e-3
    assert run["losses"][0] == counted["losses"][0]


RESUMABLE = [*FSDP4, *SKETCH, "--training.steps=4", "--checkpoint.enable"]


@pytest.fixture(scope="module")
def undisturbed(four_ranks: RankPool) -> dict[str, Any]:
    return four_ranks.run(train, RESUMABLE)[0]


@pytest.fixture(scope="module")
def stopped(four_ranks: RankPool) -> str:
    return four_ranks.run(train, RESUMABLE, "sigterm@2")[0]["dump_folder"]


def copy_of(folder: str, tmp_path: Path) -> str:
    shutil.copytree(folder, tmp_path / "run")
    return str(tmp_path / "run")


def test_a_stopped_run_resumes_with_its_residuals(
    four_ranks: RankPool, undisturbed: dict[str, Any], stopped: str, tmp_path: Path
) -> None:
    resumed = four_ranks.run(train, RESUMABLE, "", copy_of(stopped, tmp_path))[0]
    assert resumed["losses"] == undisturbed["losses"]
    assert resumed["grad_norms"] == undisturbed["grad_norms"]
    assert largest_difference(resumed, undisturbed) == 0.0


def test_residuals_of_other_ranks_are_refused_in_one_line(
    four_ranks: RankPool, stopped: str, tmp_path: Path
) -> None:
    options = [*RESUMABLE, *HSDP]
    for error in four_ranks.errors(train, options, "", copy_of(stopped, tmp_path)):
        assert "residuals cannot be resharded" in error


def test_a_dense_runs_checkpoint_needs_a_word(four_ranks: RankPool, tmp_path: Path) -> None:
    dense = [*FSDP4, "--training.steps=4", "--checkpoint.enable"]
    folder = four_ranks.run(train, dense, "sigterm@2")[0]["dump_folder"]
    for error in four_ranks.errors(train, RESUMABLE, "", copy_of(folder, tmp_path)):
        assert "saved with gradient compression" in error
    options = [*RESUMABLE, "--checkpoint.exclude_from_loading=grad_compression"]
    assert four_ranks.run(train, options, "", folder)[0]["step"] == 4


@pytest.mark.parametrize("wire", [*nightly("float32"), "bfloat16"])
def test_replicas_stay_equal_under_hsdp(wire: str, four_ranks: RankPool) -> None:
    options = [*FSDP4, *SKETCH, *HSDP, "--grad_compression.layers=non_attention"]
    options.append(f"--training.mixed_precision_reduce={wire}")
    runs = four_ranks.run(train, options, "", "", True, True)
    assert len(runs[2]["parameters"]) == len(runs[0]["parameters"]) > 10
    for name, value in runs[0]["parameters"].items():
        assert (value == runs[2]["parameters"][name]).all(), name


def test_tensor_parallel_shards_are_compressed_too(four_ranks: RankPool) -> None:
    options = [
        "--model.name=llama_full",
        "--training.local_batch_size=4",
        "--training.steps=2",
        "--parallelism.tensor_parallel_degree=2",
    ]
    plain = four_ranks.run(train, options)[0]
    run = four_ranks.run(train, [*options, *LEFT_OUT["sketch"]])[0]
    assert largest_difference(run, plain) < EXACT


SPARSE = ["--grad_compression.codec=sparse", "--grad_compression.level=10x"]
SKIPPING = [*FSDP4, "--training.steps=4", "--training.max_skipped_steps=1"]


def around_a_skipped_step(arguments: list[str]) -> dict[str, Any]:
    """Take two steps, one with a NaN in rank 1's gradient, and one more, on this rank.

    Returns:
        ``changed`` (entries of the residuals, by the skipped step and by the next one) and
        ``skipped`` steps.
    """
    with small_trainer(arguments) as trainer:
        compressors = compressors_of(trainer.model_parts)
        batches = iter(trainer.dataloader)
        changed = []
        for step in range(1, 5):
            trainer.step = step
            before = [compressor.residual.clone() for compressor in compressors]
            with spoilt_gradient(trainer.model_parts[0]) if step == 3 else nullcontext():
                trainer.train_step(batches)
            pairs = zip(compressors, before, strict=True)
            changed.append(sum(int((c.residual != old).sum()) for c, old in pairs))
        return {"changed": changed[2:], "skipped": trainer.skipped_steps}


@contextmanager
def spoilt_gradient(model: nn.Module) -> Iterator[None]:
    """Make one entry of what rank 1 hands back to the model's last norm a NaN."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        if dist.get_rank() == 1:
            spoilt.view(-1)[0] = float("nan")
        return spoilt

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(spoil)

    handle = model.get_submodule("norm").register_forward_hook(watch)
    yield
    handle.remove()


@pytest.mark.parametrize(
    ("codec", "layout"),
    [(SKETCH, HSDP), (SPARSE, []), *nightly((SKETCH, []), (SPARSE, HSDP))],
    ids=["sketch-hsdp", "sparse-fsdp", "sketch-fsdp", "sparse-hsdp"],
)
def test_a_skipped_step_leaves_every_residual_bit(
    codec: list[str], layout: list[str], four_ranks: RankPool
) -> None:
    for rank in four_ranks.run(around_a_skipped_step, [*SKIPPING, *codec, *layout]):
        assert rank["skipped"] == 1
        by_the_skipped_step, by_the_next_one = rank["changed"]
        assert by_the_skipped_step == 0 and by_the_next_one > 1000
