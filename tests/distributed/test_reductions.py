# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""In which precision and how often gradients, and Gram matrices, are summed over ranks.

Norms are in `test_layout`.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.training import train
from tests.reference.rms_norm import half_units
from tests.support.nightly import nightly
from tests.support.parity_cases import tp_mesh
from tests.support.parity_runs import degrees, largest_difference, model
from tests.support.rank_pool import RankPool
from tests.unit.tiny import build_tiny, tokens
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.ledger.ledger import CommLedger
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.models.lanes import share_channels
from torchtitan_lr.parallel.data_parallel import apply_data_parallel, synchronize_gradients
from torchtitan_lr.parallel.megatron import gather_and_sum_wide
from torchtitan_lr.parallel.paired import gather_and_copy_to_ranks
from torchtitan_lr.titan.base import ParallelDims
from torchtitan_lr.titan.device import bind_device

MICROBATCHES = 3
UNITS = 6
"""What FSDP2 gathers and reduces at a time: embedding, three blocks, head, root (the last norm)."""


def backward(model: nn.Module, micro: int, rank: int) -> None:
    ids = tokens(model.model_args, seed=10 * micro + rank)
    cross_entropy_sum(model(ids), ids).backward()


def local_gradients(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Every micro-batch's gradients of this rank's data alone, computed in a dtype."""
    found = []
    for micro in range(MICROBATCHES):
        model = build_tiny("cola", dtype)
        if torch.__version__ >= "2.15":  # FSDP2 then has autograd give gradients in fp32
            for parameter in model.parameters():
                parameter.grad_dtype = torch.float32
        backward(model, micro, dist.get_rank())
        found.append({name: p.grad for name, p in model.named_parameters()})
    return found


HALF_UNIT = 2**-8
"""bf16's: rounding changes a number by at most this share of it."""


def shard(model: nn.Module, dtype: str, wire: str, replicas: int) -> ParallelDims:
    """Shard a model over 4 ranks, or 4 / replicas of them."""
    bind_device()
    options = [f"--training.mixed_precision_param={dtype}"]
    config = build_job_config([*options, f"--training.mixed_precision_reduce={wire}"])
    dims = ParallelDims(replicas, 4 // replicas, 1, 1, 1, 1, 1, world_size=4)
    apply_data_parallel(model, dims, config)
    return dims


def reduction(
    dtype: str, replicas: int, wire: str = "float32"
) -> tuple[set[str], dict[tuple[str, str], int], float, float, float]:
    """What 4 ranks send for three micro-batches, as the trainer does, and three errors; on a rank.

    Sent are dtypes of gathers, and calls of sums by operation and dtype. Two are relative rms
    errors of all gradients against fp64: of what the layout summed over ranks and micro-batches,
    and of the exact sum rounded to bf16 once. The third is the largest error of an entry, over
    `HALF_UNIT` times the sum of its terms' magnitudes.
    """
    model = build_tiny("cola")
    dims = shard(model, dtype, wire, replicas)
    names = [name for name in ("dp_replicate", "fsdp") if dims.get_optional_mesh(name)]
    with CommLedger([model], {name: dims.get_mesh(name).get_group() for name in names}) as ledger:
        for micro in range(MICROBATCHES):
            synchronize_gradients([model], micro == MICROBATCHES - 1)
            backward(model, micro, dist.get_rank())
    gathers = {row["dtype"] for row in ledger.rows() if row["op"] == "all_gather"}
    sums: dict[tuple[str, str], int] = {}
    for row in ledger.rows():
        if row["op"] != "all_gather":
            key = row["op"], row["dtype"]
            sums[key] = sums.get(key, 0) + row["calls"]
    parts = local_gradients(getattr(torch, dtype))
    found, exact, magnitudes = [], [], []
    for name, parameter in model.named_parameters():
        terms = torch.stack([part[name].double() for part in parts])
        total, size = terms.sum(0), terms.abs().sum(0)
        dist.all_reduce(total)
        dist.all_reduce(size)
        exact.append(total.flatten())
        magnitudes.append(size.flatten())
        found.append(parameter.grad.full_tensor().double().flatten())
    whole, ours = torch.cat(exact), torch.cat(found)
    errors = [float((x - whole).norm() / whole.norm()) for x in (ours, whole.bfloat16().double())]
    units = (ours - whole).abs() / (HALF_UNIT * torch.cat(magnitudes)).clamp(min=1e-30)
    return gathers, sums, *errors, float(units.max())


@pytest.mark.parametrize(("dtype", "replicas"), [("bfloat16", 1), ("float32", 2)])
def test_sums_are_in_fp32_and_of_replicas_once(
    dtype: str, replicas: int, four_ranks: RankPool
) -> None:
    """The sums over ranks and micro-batches are those of fp64, up to fp32."""
    expected = {("reduce_scatter", "float32"): UNITS * MICROBATCHES}
    if replicas > 1:
        expected["all_reduce", "float32"] = UNITS  # after the last micro-batch
    for gathers, sums, error, rounded, units in four_ranks.run(reduction, dtype, replicas):
        assert (gathers, sums) == ({dtype}, expected)
        assert error <= rounded / 100  # one rounding of the sum to bf16 would be too much
        assert units < 0.01


@pytest.mark.parametrize(
    ("dtype", "replicas"), [("float32", 2), *nightly(("bfloat16", 1), ("float32", 4))]
)
def test_bf16_on_the_wire_rounds_once_per_term_and_sum(
    dtype: str, replicas: int, four_ranks: RankPool
) -> None:
    """n ranks round each term, and n - 1 sums: n half units. HSDP rounds for both its dims."""
    shards = 4 // replicas
    most = (shards if shards > 1 else 0) + (replicas if replicas > 1 else 0)
    for _, sums, error, rounded, units in four_ranks.run(reduction, dtype, replicas, "bfloat16"):
        # The same calls as in fp32: a reduce-scatter per micro-batch, an all-reduce per step.
        expected = {("all_reduce", "bfloat16"): UNITS} if replicas > 1 else {}
        if shards > 1:
            expected["reduce_scatter", "bfloat16"] = UNITS * MICROBATCHES
        assert sums == expected
        # fp32's sums and second orders of bf16's are within 2%.
        assert 0.2 < units <= 1.02 * most
        assert error > rounded / 3


class Counted(nn.Module):
    """The gradient of each entry of its weights, which are 0, is its input; so is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + x.detach() * self.weight.sum()


class Units(nn.Module):
    """What `apply_data_parallel` wraps: an embedding, layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = Counted(), Counted()
        self.layers = nn.ModuleList([Counted()])

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers[0](self.tok_embeddings(x)))


def whole_numbers(replicas: int) -> set[float]:
    """All gradients of micro-batches with gradients 256, 1, 1, 1, 1 on each of 4 ranks."""
    model = Units()
    shard(model, "float32", "bfloat16", replicas)
    for micro, number in enumerate((256.0, 1.0, 1.0, 1.0, 1.0)):
        synchronize_gradients([model], micro == 4)
        model(torch.tensor(number, requires_grad=True)).backward()
    return {x for p in model.parameters() for x in p.grad.full_tensor().flatten().tolist()}


@pytest.mark.parametrize("replicas", [2, *nightly(1, 4)])
def test_micro_batches_are_added_in_fp32_before_bf16_travels(
    replicas: int, four_ranks: RankPool
) -> None:
    """bf16 has 260 and 1040, but 256 + 1 and 512 + 2 are 256 and 512 in bf16."""
    assert four_ranks.run(whole_numbers, replicas) == [{4 * 260.0}] * 4


def lane_sums(wide: bool) -> tuple[float, float]:
    """Errors, in half units of bf16, of both backward sums over ranks; on a rank."""
    ranks = Ranks.of(tp_mesh(4))
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(4, 2, 8, 1, 64, generator=generator).bfloat16()  # a rank's first
    x = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    share_channels(x, 48, wide, ranks).backward(terms[ranks.rank])
    exact = terms.double().sum(0)
    assert x.grad is not None
    assert torch.equal(x.grad[..., 48:], terms[ranks.rank][..., 48:])
    shared = half_units(x.grad[..., :48], exact[..., :48])
    own = torch.zeros(2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    gathered = (gather_and_sum_wide if wide else gather_and_copy_to_ranks)(own, ranks)
    gathered.backward(terms[ranks.rank].squeeze(2))
    assert own.grad is not None
    return shared, half_units(own.grad, exact.squeeze(2).chunk(4, -1)[ranks.rank])


@pytest.mark.parametrize("wide", [True, False])
def test_lanes_gradients_are_summed_in_fp32_if_asked(wide: bool, four_ranks: RankPool) -> None:
    """Then a sum is the exact one rounded once; a thousand sums in bf16 are not."""
    for errors in four_ranks.run(lane_sums, wide):
        for error in errors:
            # What fp32 loses of four terms counts 2⁻¹⁴ of bf16's half unit, more by cancellation.
            assert error <= 1.01 if wide else error > 3


def test_bf16_parameters_are_rounded_as_in_one_process(
    four_ranks: RankPool, reference: Any
) -> None:
    """All is fp64 but Gram matrices, fp32. In bf16 3% of the weights differ, 41% of Muon's."""
    arguments = [*model("cola"), "--optimizer.name=LoRAMuon", "--optimizer.lr=1e-2"]
    arguments += ["--optimizer.adamw_lr=1e-3", "--training.dtype=bfloat16", "--training.steps=3"]
    run = four_ranks.run(train, [*arguments, *degrees(tensor=2, local_batch=4)])[0]
    alone = reference(*arguments)
    assert largest_difference(run, alone) <= 2 * HALF_UNIT
    differ = [(run["parameters"][n] != w).ravel() for n, w in alone["parameters"].items()]
    share = np.concatenate(differ).mean()
    assert share < 0.01
