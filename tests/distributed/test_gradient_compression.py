# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2 and HSDP on four ranks.

Gradients here are whole numbers, whose sums are exact in fp32: what equals, equals in every bit.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.unit.tiny import build_tiny
from torchtitan_lr.compression import fsdp as gradient_compression
from torchtitan_lr.compression.fsdp import apply_gradient_compression, compressor_of, compressors_of
from torchtitan_lr.compression.settings import CompressionSettings
from torchtitan_lr.compression.sizes import CodecSizes
from torchtitan_lr.formulas.compression import (
    Exchange,
    all_reduce_traffic,
    reduce_scatter_traffic,
    replicated,
)
from torchtitan_lr.formulas.traffic import Traffic
from torchtitan_lr.ledger.comparison import compare, differences
from torchtitan_lr.ledger.ledger import CommLedger, mesh_dims_of
from torchtitan_lr.models.loss import cross_entropy_sum
from torchtitan_lr.parallel.data_parallel import sum_gradients, synchronize_gradients
from torchtitan_lr.tools.rank_pool import RankPool

SHAPES = {"wide": (37, 11), "tiny": (3,), "tall": (50, 7), "odd": (5, 13), "scale": (1,)}
"""None divides by the ranks; `min_size` 60 leaves two of them dense, between the others."""


@dataclass(frozen=True)
class Case:
    """What to compress, on which layout."""

    codec: CodecSizes
    hsdp: bool = False
    microbatches: int = 1
    min_size: int = 60
    layers: str = "all"
    patterns: tuple[str, ...] = ()
    forced: bool = False
    """Whether units send a sketch that they are too small for."""

    @property
    def ranks(self) -> int:
        return 2 if self.hsdp else 4

    def settings(self) -> CompressionSettings:
        return CompressionSettings(
            codec=self.codec,
            requested_theta=self.codec.theta,
            ranks=self.ranks,
            layers=self.layers,
            patterns=self.patterns,
            min_size=self.min_size,
            residual_dtype=torch.float32,
            seed=0,
        )


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


def build(case: Case) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(Weighted(), Weighted())
    meshes = layout(case.hsdp)
    shard_mesh, mesh = meshes["fsdp"], meshes["dp_replicate" if case.hsdp else "fsdp"]
    for unit in (*model, model):
        fully_shard(unit, mesh=shard_mesh)
    sum_gradients(model)
    if case.codec.name != "none":
        compress(model, mesh, case)
    return model, mesh


def compress(model: nn.Module, mesh: DeviceMesh, case: Case) -> None:
    forced = patch.object(gradient_compression, "unit_codec", as_asked)
    with forced if case.forced else nullcontext():
        apply_gradient_compression(model, mesh, case.settings(), all_reduce=case.hsdp)


def as_asked(codec: CodecSizes, *size: Any) -> CodecSizes:
    return codec


def step_gradients(model: nn.Module, case: Case, step: int) -> dict[str, Tensor]:
    """Run one step's micro-batches; return the full gradients."""
    for p in model.parameters():
        p.grad = None
    for micro in range(case.microbatches):
        synchronize_gradients([model], micro == case.microbatches - 1)
        for index, unit in enumerate(model):
            unit.gradients = {n: gradient(n, index, dist.get_rank(), step, micro) for n in SHAPES}
        model(torch.zeros(2, requires_grad=True)).sum().backward()
    # The output counts every gradient twice: it has two entries.
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def true_sum(name: str, case: Case, step: int) -> Tensor:
    index, _, tensor = name.partition(".")
    parts = [
        2 * gradient(tensor, int(index), rank, step, micro)
        for rank in range(4)
        for micro in range(case.microbatches)
    ]
    return torch.stack(parts).sum(0)


def owed_by_name(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Sum residuals over all ranks and cut them into the full parameters' shapes.

    FSDP cuts a tensor along its first dimension into W equal parts, the last ones padded.
    """
    owed = {}
    for index, unit in enumerate(model):
        compressor = compressor_of(unit)
        if case.hsdp:
            flat = compressor.residual.flatten()[: compressor.compressed_size]
            shards = [torch.zeros_like(flat) for _ in range(4)]
            dist.all_gather(shards, flat)
            # Ranks (replica, shard): 0 and 2 hold the same shard.
            rows = torch.stack([shards[0] + shards[2], shards[1] + shards[3]])
        else:
            rows = compressor.residual.clone()
            dist.all_reduce(rows)
        start = 0
        for name, shape in SHAPES.items():
            size = torch.Size(shape).numel()
            if size < case.min_size:
                owed[f"{index}.{name}"] = torch.zeros(shape)
                continue
            per_row = -(-shape[0] // len(rows)) * (size // shape[0])
            cut = rows[:, start : start + per_row].reshape(-1, *shape[1:])
            owed[f"{index}.{name}"] = cut[: shape[0]]
            start += per_row
        assert start == compressor.compressed_size
    return owed


def books(case: Case, steps: int = 4, fault: str = "") -> dict[str, Any]:
    """Largest |sent + owed after − owed before − gradient| of every step, and what was owed."""
    model, _ = build(case)
    before = owed_by_name(model, case)
    errors, owed = [], []
    for step in range(steps):
        if fault == "forget" and dist.get_rank() == 1:
            for compressor in compressors_of([model]):
                compressor.residual.zero_()
        if fault == "seed" and dist.get_rank() == 1:
            for compressor in compressors_of([model]):
                compressor.seed = 99
        sent = step_gradients(model, case, step)
        after = owed_by_name(model, case)
        differences = [
            (sent[n] + after[n] - before[n] - true_sum(n, case, step)).abs().max() for n in sent
        ]
        errors.append(float(max(differences)))
        owed.append(float(max(value.abs().max() for value in after.values())))
        before = after
    exchanges = [compressor.exchanges for compressor in compressors_of([model])]
    return {"errors": errors, "owed": owed, "exchanges": exchanges}


SKETCH = CodecSizes("sketch", 4, 0.96)
"""Units here are small: at the smallest theta for large ones they would travel dense."""

CASES = {
    "sparse": Case(CodecSizes("sparse", 1, 0.9)),
    "sketch": Case(SKETCH),
    "sketch_10x": Case(CodecSizes("sketch", 10, 0.9875)),
    "sketch_sum4": Case(replace(SKETCH, index="sum4")),
    "sketch_that_sticks": Case(CodecSizes("sketch", 10, 0.8), forced=True),
    "sparse_accumulate3": Case(CodecSizes("sparse", 1, 0.9), microbatches=3),
    "sketch_accumulate3": Case(SKETCH, microbatches=3),
    "sparse_hsdp": Case(CodecSizes("sparse", 1, 0.9), hsdp=True),
    "sparse_hsdp_dense_return": Case(CodecSizes("sparse", 1, 0.4), hsdp=True),
    "sketch_hsdp": Case(CodecSizes("sketch", 10, 0.9875), hsdp=True, microbatches=2),
}


def books_of_all() -> dict[str, dict[str, Any]]:
    return {name: books(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def all_books(four_ranks: RankPool) -> list[dict[str, dict[str, Any]]]:
    return four_ranks.run(books_of_all)


@pytest.mark.parametrize("name", CASES)
def test_sent_and_residual_are_the_gradient_exactly(
    name: str, all_books: list[dict[str, dict[str, Any]]]
) -> None:
    for result in (rank[name] for rank in all_books):
        assert result["errors"] == [0.0] * 4
        assert min(result["owed"]) > 100
        assert result["exchanges"] == [4, 4]


def test_a_forgotten_residual_is_noticed(four_ranks: RankPool) -> None:
    result = four_ranks.run(books, CASES["sketch"], 3, "forget")[0]
    assert result["errors"][0] == 0 and min(result["errors"][1:]) > 100


def test_a_rank_with_other_hashes_is_noticed(four_ranks: RankPool) -> None:
    result = four_ranks.run(books, CASES["sketch"], 2, "seed")[0]
    assert min(result["errors"]) > 100


def plain_difference(case: Case) -> float:
    """Largest difference to FSDP2 without compression over 2 steps, in whole numbers."""
    model, _ = build(case)
    plain, _ = build(replace(case, codec=CodecSizes("none")))
    worst = 0.0
    for step in range(2):
        ours, theirs = (step_gradients(m, case, step) for m in (model, plain))
        if case.hsdp:  # without compression nobody sums the plain model's replicas
            theirs = {name: true_sum(name, case, step) for name in theirs}
        worst = max(worst, *(float((ours[n] - theirs[n]).abs().max()) for n in ours))
    return worst


@pytest.mark.parametrize("hsdp", [False, True])
@pytest.mark.parametrize(
    "codec",
    [CodecSizes("dense"), CodecSizes("sparse", 1, 0.0), CodecSizes("sketch", 0.5, 0.0)],
    ids=lambda codec: codec.name,
)
def test_nothing_left_out_is_plain_fsdp(
    codec: CodecSizes, hsdp: bool, four_ranks: RankPool
) -> None:
    assert four_ranks.run(plain_difference, Case(codec, hsdp, 2)) == [0.0] * 4


def ledger_differences(case: Case) -> tuple[list[Any], int, int]:
    """Compare one counted step of a small model with the formulas; count bytes and parameters."""
    torch.manual_seed(0)
    model = build_tiny("full")
    meshes = layout(case.hsdp)
    for unit in (model.tok_embeddings, *model.layers.values(), model.output, model):
        fully_shard(unit, mesh=meshes["fsdp"])
    sum_gradients(model)
    name = "dp_replicate" if case.hsdp else "fsdp"
    apply_gradient_compression(model, meshes[name], case.settings(), all_reduce=case.hsdp)
    ledger = CommLedger([model], mesh_dims_of({n: meshes[n] for n in ("fsdp", "dp_replicate")}))
    with ledger:
        for micro in range(case.microbatches):
            synchronize_gradients([model], micro == case.microbatches - 1)
            tokens = torch.arange(32).view(2, 16) % 96
            cross_entropy_sum(model(tokens), tokens).backward()
    units = {"embedding": model.tok_embeddings, "head": model.output}
    units |= {f"block {n}": block for n, block in model.layers.items()}
    expected = [row for scope, unit in units.items() for row in predicted(unit, case, scope, name)]
    expected += predicted(model, case, "head", name)
    rows = [
        row
        for row in ledger.rows()
        if row["mesh_dim"] == name and (row["op"], row["dtype"]) != ("all_gather", "float32")
    ]
    if case.hsdp:
        rows = [row for row in ledger.rows() if row["mesh_dim"] == name]
    table = compare(rows, expected, {"gradient": "float32", "index": "uint8"})
    assert any(row["calls"] for row in table)
    saved = sum(compressor_of(unit).bytes_saved() for unit in (*units.values(), model))
    return differences(table), sum(row["bytes"] for row in rows), saved


def predicted(unit: nn.Module, case: Case, scope: str, mesh_dim: str) -> list[Traffic]:
    """What the formulas say of one FSDP unit, from the sizes of its tensors' shards."""
    spans = compressor_of(unit).spans
    chosen = sum(span.size for span in spans if span.compressed)
    entries = (chosen, sum(span.size for span in spans) - chosen)
    if case.hsdp:
        shared = replicated(*entries, case.ranks, case.codec)
        return all_reduce_traffic(shared, case.codec, scope, mesh_dim)
    return reduce_scatter_traffic(Exchange(case.ranks, *entries), case.codec, scope, mesh_dim)


def dense(case: Case) -> Case:
    """The layout of a case with every codec's baseline."""
    return Case(CodecSizes("dense"), case.hsdp, case.microbatches, min_size=1000)


LEDGER = {
    name: replace(case, min_size=1000) for name, case in CASES.items() if "sticks" not in name
}


def all_ledger_differences() -> dict[Case, tuple[list[Any], int, int]]:
    cases = {*LEDGER.values(), *map(dense, LEDGER.values())}
    return {case: ledger_differences(case) for case in sorted(cases, key=str)}


@pytest.fixture(scope="module")
def ledgers(four_ranks: RankPool) -> dict[Case, tuple[list[Any], int, int]]:
    return four_ranks.run(all_ledger_differences)[0]


@pytest.mark.parametrize("name", LEDGER)
def test_the_ledger_counts_what_the_formulas_say(name: str, ledgers: dict[Case, Any]) -> None:
    wrong, measured, saved = ledgers[LEDGER[name]]
    assert wrong == []
    _, whole, nothing = ledgers[dense(LEDGER[name])]
    assert nothing == 0 and saved == whole - measured


def test_a_formula_that_is_off_by_one_is_noticed(four_ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="assert"):
        four_ranks.run(ledger_with_wrong_formula)


def ledger_with_wrong_formula() -> None:
    with patch("torchtitan_lr.formulas.compression.verdict_bytes", lambda m: 1 + m // 8):
        assert ledger_differences(replace(CASES["sketch"], min_size=1000))[0] == []


SIZES = (16, 64, 4000)
"""Entries of a destination, by unit: the first two are too small for a tenfold sketch."""


def units_of_all_sizes(forced: bool, steps: int = 12) -> tuple[str, list[float]]:
    """Reduce units of three sizes; return what was logged, and what share of each was delivered."""
    model = nn.Sequential(*(nn.Linear(size // 2, 8, bias=False) for size in SIZES))
    mesh = layout(False)["fsdp"]
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    sum_gradients(model)
    case = Case(CodecSizes("sketch", 10, 0.9875), min_size=1, forced=forced)
    with patch.object(gradient_compression.logger, "info") as log:
        compress(model, mesh, case)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sent, added = torch.zeros(2, len(SIZES), dtype=torch.float64)
    for _ in range(steps):
        model.zero_grad()
        for index, unit in enumerate(model):
            # Every row of the weight's gradient is this rank's input.
            x = torch.randint(1, 9, (1, SIZES[index] // 2), generator=generator).float()
            unit(x).sum().backward()
            sent[index] += unit.weight.grad.full_tensor().sum()
            added[index] += 8 * x.sum()
    dist.all_reduce(added)
    lines = [call.args[0] % call.args[1:] for call in log.call_args_list]
    return "\n".join(lines), (sent / added).tolist()


def test_a_unit_too_small_for_its_sketch_travels_dense(four_ranks: RankPool) -> None:
    for log, delivered in four_ranks.run(units_of_all_sizes, False):
        assert delivered[:2] == [1, 1] and 0.05 < delivered[2] < 1
        assert "1 of 3 tensors compressed" in log and "dense: 0, 1" in log
        assert "too small for a sketch to peel, so dense: 0 (16 entries a destination: load " in log
        assert "1 (64 entries a destination: load 0.43 above 0.24)" in log


def test_a_sketch_of_a_small_unit_delivers_little(four_ranks: RankPool) -> None:
    """The control: the same units, sent by sketch."""
    for log, delivered in four_ranks.run(units_of_all_sizes, True):
        assert max(delivered[:2]) < 0.5 and "too small" not in log


def after_a_nan(case: Case) -> tuple[bool, bool, float]:
    """Run a step, then one in which rank 1's loss is NaN: what was sent, owed, and still owed."""
    model, _ = build(case)
    step_gradients(model, case, 0)
    before = [compressor.residual.clone() for compressor in compressors_of([model])]
    weight = float("nan") if dist.get_rank() == 1 else 0.0
    for unit in model:
        unit.gradients = {name: torch.ones(shape) * weight for name, shape in SHAPES.items()}
    model.zero_grad()
    model(torch.zeros(2, requires_grad=True)).sum().backward()
    sent = all(p.grad.full_tensor().isfinite().all() for p in model.parameters())
    owed = [compressor.residual for compressor in compressors_of([model])]
    kept = [(a == b).float().mean() for a, b in zip(owed, before, strict=True)]
    return sent, all(bool(x.isfinite().all()) for x in owed), float(min(kept))


@pytest.mark.parametrize("name", ["sparse", "sketch_10x", "sketch_hsdp"])
def test_a_nan_is_sent_and_leaves_the_residual_as_it_was(name: str, four_ranks: RankPool) -> None:
    for sent_is_finite, owed_is_finite, kept in four_ranks.run(after_a_nan, CASES[name]):
        assert not sent_is_finite and owed_is_finite and kept > 0.85


def unused_parameter() -> None:
    model, _ = build(CASES["sketch"])
    for unit in model:
        unit.gradients = {name: torch.ones(SHAPES[name]) for name in ("wide", "tall")}
    model(torch.zeros(2, requires_grad=True)).sum().backward()


def test_a_tensor_without_gradient_is_named(four_ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="a tensor of this unit took no part in the step"):
        four_ranks.run(unused_parameter)
