# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs with compressed gradients: metrics, and resumes with other keys of `[grad_compression]`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import small_trainer, train
from tests.support.parity_runs import degrees, largest_difference, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.compression.codecs import Codec, SparseCodec
from torchtitan_lr.compression.sketch import SketchCodec
from torchtitan_lr.compression.units import compressors_of
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.training.history import HISTORY_FILE, read_history


def history(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_history(Path(run["dump_folder"]) / HISTORY_FILE)


def test_metrics_tell_what_compression_did(four_ranks: RankPool) -> None:
    # Enough tokens that the embedding's gradient has more entries than are sent.
    dense = ["--model.name=llama_full", "--training.local_batch_size=2", "--training.seq_len=64"]
    dense += ["--training.steps=3", "--metrics.comm_ledger"]
    sketch = ["--grad_compression.codec=sketch", "--grad_compression.level=10x"]
    run = four_ranks.run(train, [*dense, *sketch], "", "", False)[0]  # bytes are those of fp32
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


DENSE = [
    *("--model.name=llama_full", "--training.local_batch_size=4", "--training.steps=4"),
    "--checkpoint.enable",
]
SKETCH = ["codec=sketch", "min_size=1000", "level=custom", "c=4", "theta=0.92"]
APPLIED: dict[str, tuple[list[str], Codec | None]] = {
    "nothing": ([], SketchCodec(2, 4, 0.92)),
    "codec": (["codec=sparse"], SparseCodec(2, 4, 0.92)),
    "without a codec": (["codec=none"], None),
    "level": (["level=10x"], SketchCodec(2, 10, 0.9875)),
    "c, theta": (["c=2", "theta=0.95"], SketchCodec(2, 2, 0.95)),
}
REFUSED = {
    "auto": (["theta=0.5"], "grad_compression.theta: got 0.5, expected a theta of at least "),
    "layers": (["layers=non_attention"], "grad_compression.layers: got 'non_att"),
    "min_size": (["min_size=5000"], "grad_compression.min_size: got 5000, expected 1000"),
    "dense": (None, "expected one with grad_compression: it holds"),
}


def arguments(folder: str, changes: list[str]) -> list[str]:
    more = [f"--grad_compression.{change}" for change in [*SKETCH, *changes]]
    return [*DENSE, f"--job.dump_folder={folder}", *more]


def residuals_of(trainer: Any) -> list[tuple[torch.Tensor, int]]:
    found = compressors_of(trainer.model_parts)
    return [(each.residual.clone(), each.exchanges) for each in found]


def save_run(options: list[str]) -> list[tuple[torch.Tensor, int]]:
    """Stop a run after two steps; return its residuals."""
    with small_trainer(options) as trainer:
        batches = iter(trainer.dataloader)
        for trainer.step in (1, 2):
            trainer.train_step(batches)
        trainer.checkpointer.save(2, last_step=True)
        return residuals_of(trainer)


def every_change(folder: str) -> dict[str, str]:
    """Go on with each change on this rank; return the refusals."""
    left = save_run(arguments(folder, []))
    assert any(residual.any() for residual, _ in left)
    save_run([*DENSE, f"--job.dump_folder={folder}-dense"])
    for name, (changes, codec) in APPLIED.items():
        with small_trainer(arguments(folder, changes)) as trainer:
            assert trainer.checkpointer.load(2)
            compressors = compressors_of(trainer.model_parts)
            assert {each.codec for each in compressors} == ({codec} - {None}), name
            for (residual, exchanges), (saved, count) in zip(
                residuals_of(trainer), left, strict=codec is not None
            ):
                assert torch.equal(residual, saved), name
                assert exchanges == count == 2
    found = {}
    for name, (changes, _) in REFUSED.items():
        options = arguments(folder, changes or [])
        if changes is None:
            options = arguments(f"{folder}-dense", [])
        with pytest.raises(ConfigError) as error, small_trainer(options):
            pass
        found[name] = str(error.value)
    # A word of its user lets a run without residuals go on with them.
    word = ["--checkpoint.exclude_from_loading=grad_compression", "--checkpoint.load_step=2"]
    with small_trainer([*arguments(f"{folder}-dense", []), *word]) as trainer:
        assert trainer.checkpointer.load(2)
    return found


def test_a_changed_key_is_applied_or_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for rank in two_ranks.run(every_change, str(tmp_path / "run")):
        for name, (_, line) in REFUSED.items():
            assert line in rank[name] and "\n" not in rank[name], name


def test_residuals_of_the_other_split_are_refused(four_ranks: RankPool) -> None:
    """Muon splits A (r, d_in) along d_in: of equal shapes and tensors, but in another order."""
    options = [*model("cola"), *degrees(local_batch=2), "--training.seq_len=64"]
    options += ["--training.steps=4", "--checkpoint.enable", "--optimizer.lr=1e-3"]
    options += ["--grad_compression.codec=sparse", "--grad_compression.min_size=1"]
    stopped = four_ranks.run(train, [*options, "--optimizer.name=Muon"], "sigterm@2")[0]
    adamw = [*options, "--checkpoint.exclude_from_loading=optimizer", "--checkpoint.load_step=2"]
    way = "--checkpoint.exclude_from_loading=optimizer,grad_compression --checkpoint.load_step=2"
    for error in four_ranks.errors(train, adamw, "", stopped["dump_folder"]):
        assert "optimizer.name: got 'AdamW', expected 'Muon' as in " in error
        assert f"{way} goes on without its grad_compression; " in error
