# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2 and HSDP; whole numbers as gradients, so that sums are exact.

Then runs: metrics, and resumes with other keys of `[grad_compression]`.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.training import small_trainer, train
from tests.support.parity_runs import largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.compression.codecs import Codec, SparseCodec
from torchtitan_lr.compression.settings import CompressionSettings
from torchtitan_lr.compression.sketch import SketchCodec
from torchtitan_lr.compression.units import apply_gradient_compression, compressors_of
from torchtitan_lr.parallel.data_parallel import sum_gradients, synchronize_gradients
from torchtitan_lr.training.history import HISTORY_FILE, read_history

SHAPES = {"wide": (37, 11), "tiny": (3,), "tall": (50, 7), "odd": (5, 13), "scale": (1,)}
"""None divides by the ranks; ``min_size`` leaves two of them dense, between the others."""
MIN_SIZE = 60


@dataclass(frozen=True)
class Case:
    kind: Any
    c: float = 1.0
    theta: float = 0.9
    half: bool = False
    hsdp: bool = False
    microbatches: int = 1


# Units here are small: at the smallest theta for large ones they would travel dense. The smallest
# for them leaves least to later steps.
CASES = {
    "sparse": Case(SparseCodec, microbatches=3),
    "sketch_half": Case(SketchCodec, 2, 0.9, half=True),
    "sparse_hsdp_dense_return": Case(SparseCodec, theta=0.4, hsdp=True),
    "sparse_half_hsdp": Case(SparseCodec, half=True, hsdp=True),
    "sketch_hsdp": Case(SketchCodec, 2, 0.8, hsdp=True, microbatches=2),
}


class Weighted(nn.Module):
    """Its output's gradient with respect to each parameter is what `gradients` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: dict[str, Tensor] = {}
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        for name, gradient in self.gradients.items():
            x = x + (getattr(self, name) * gradient).sum()
        return x


def gradient(name: str, unit: int, rank: int, step: int, micro: int) -> Tensor:
    """Whole numbers of very different size, as gradients are."""
    seed = hash((len(name), SHAPES[name], unit, rank, step, micro)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPES[name], generator=generator).exp() * 100).round()


@cache
def layout(hsdp: bool) -> DeviceMesh:
    """Two replicas of two shards, or four shards; the groups are made once."""
    shape = (2, 2) if hsdp else (1, 4)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "fsdp"))


def build(case: Case) -> nn.Module:
    model, meshes = nn.Sequential(Weighted(), Weighted()), layout(case.hsdp)
    for unit in (*model, model):
        fully_shard(unit, mesh=meshes["fsdp"])
    sum_gradients(model)
    mesh = meshes["dp_replicate" if case.hsdp else "fsdp"]
    settings = CompressionSettings(
        case.kind(mesh.size(), case.c, case.theta, case.half), "all", MIN_SIZE
    )
    apply_gradient_compression(model, mesh, settings, all_reduce=case.hsdp)
    return model


def step_gradients(model: nn.Module, micro_batches: Any) -> dict[str, Tensor]:
    """Run one step with these gradients, by unit and name; return the full sums."""
    for p in model.parameters():
        p.grad = None
    for micro, gradients in enumerate(micro_batches):
        synchronize_gradients([model], micro == len(micro_batches) - 1)
        for unit, own in zip(model, gradients, strict=True):
            unit.gradients = own
        model(torch.zeros(2, requires_grad=True)).sum().backward()
    # The output counts every gradient twice: it has two entries.
    return {n: p.grad.full_tensor() / 2 for n, p in model.named_parameters()}


def drawn(case: Case, step: int, rank: int) -> list[list[dict[str, Tensor]]]:
    """The gradients of a step's micro-batches on a rank, by unit and name."""
    return [
        [{name: gradient(name, unit, rank, step, micro) for name in SHAPES} for unit in range(2)]
        for micro in range(case.microbatches)
    ]


NOTHING = [[{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2]


def books(case: Case, steps: int = 3) -> dict[str, Any]:
    """What all steps of a run sent is compared with its gradients, in bits."""
    model, owed, unpeeled = build(case), list[float](), 0.0
    compressors = compressors_of([model])
    left = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    # Steps without a gradient send what the others left.
    while len(owed) < steps or (owed[-1] and len(owed) < 150):
        for compressor in compressors:
            compressor.measuring = True
        found = [drawn(case, len(owed), rank) for rank in range(4 if len(owed) < steps else 0)]
        for micro_batches in found:
            for gradients in micro_batches:
                for index, own in enumerate(gradients):
                    for name, value in own.items():
                        left[f"{index}.{name}"] += value
        own = found[dist.get_rank()] if found else NOTHING
        for name, value in step_gradients(model, own).items():
            left[name] -= value
        largest = torch.stack([c.residual.abs().max() for c in compressors]).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        owed.append(float(largest))
        unpeeled += sum(float(c.counts[1]) for c in compressors)
    # What is not compressed has no residual for what bf16 rounds off.
    whole = [value for value in left.values() if not case.half or value.numel() >= MIN_SIZE]
    return {
        "left": max(float(value.abs().max()) for value in whole),
        "owed": owed,
        "exchanges": [compressor.exchanges for compressor in compressors],
        "unpeeled": unpeeled,
    }


@pytest.mark.parametrize("name", CASES)
def test_what_all_steps_send_are_the_gradients_exactly(name: str, four_ranks: RankPool) -> None:
    ranks = four_ranks.run(books, CASES[name])
    for found in ranks:
        owed = found["owed"]
        assert found["left"] == 0 and min(owed[:3]) > 100 and owed[-1] == 0
        assert found["exchanges"] == [len(owed)] * 2
    # In sketches as small as these a part is not decoded in some step, and sent again.
    assert any(found["unpeeled"] for found in ranks) == name.startswith("sketch")


def history(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_history(Path(run["dump_folder"]) / HISTORY_FILE)


def test_metrics_tell_what_compression_did(two_ranks: RankPool) -> None:
    # Enough tokens that the embedding's gradient has more entries than are sent.
    dense = ["--model.name=llama_full", "--training.local_batch_size=4", "--training.seq_len=64"]
    dense += ["--training.steps=3", "--metrics.comm_ledger"]
    sketch = ["--grad_compression.codec=sketch", "--grad_compression.level=10x"]
    run = two_ranks.run(train, [*dense, *sketch], "", "", False)[0]  # bytes are those of fp32
    records = history(run)
    assert len(records) == 3
    for record in records:
        assert record["grad_compression/sparsity"] >= 0.9875
        assert record["grad_compression/sparsity"] < 0.99
        assert record["grad_compression/unpeeled_share"] < 0.01
    norms = [record["grad_compression/residual_norm"] for record in records]
    assert norms == sorted(norms) and norms[0] > 0  # it fills up in the first steps
    counted = two_ranks.run(train, dense, "", "", False)[0]
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
    "codec, level": (["codec=sparse", "level=10x"], SparseCodec(2, 10, 0.9875)),
    "without a codec": (["codec=none"], None),
    "c, theta": (["c=2", "theta=0.95"], SketchCodec(2, 2, 0.95)),
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


def every_change(folder: str) -> None:
    """Go on with each change on this rank."""
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
    # A word of its user lets a run without residuals go on with them.
    word = ["--checkpoint.exclude_from_loading=grad_compression", "--checkpoint.load_step=2"]
    with small_trainer([*arguments(f"{folder}-dense", []), *word]) as trainer:
        assert trainer.checkpointer.load(2)


def test_a_changed_key_is_applied(two_ranks: RankPool, tmp_path: Path) -> None:
    """Others are refused before ranks start: tests/unit/checks/test_config_stored.py."""
    two_ranks.run(every_change, str(tmp_path / "run"))
