# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that train apart between outer steps, in layouts of their own.

What an outer step does to a parameter, and how messages are coded, is in `tests/unit/optim`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.test_layout import RUN, on_paper
from tests.distributed.training import small_trainer, train
from tests.support import layout_runs
from tests.support.nightly import nightly
from tests.support.parity_runs import EXACT, degrees, largest_difference
from tests.support.rank_pool import RankPool
from tests.unit.optim.test_outer import rounded
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.config.schema import Outer
from torchtitan_lr.costs.step_traffic import compare, differences
from torchtitan_lr.optim.containers import trained_parameters
from torchtitan_lr.optim.entries import ENTRIES, OptimizerEntry, register_optimizer
from torchtitan_lr.optim.outer import OuterSteps
from torchtitan_lr.titan.components import OptimizersContainer
from torchtitan_lr.training.history import TRAIN_COMMON, VALIDATION_COMMON, read_history
from torchtitan_lr.training.verdict import NonFiniteError

COLA = ["--model.name=llama_cola", "--training.steps=4", "--lr_scheduler.warmup_steps=0"]
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
PLAIN = ["--outer.lr=1", "--outer.momentum=0", "--outer.no_nesterov"]  # the mean of the weights
APART = [*COLA, REPLICAS, "--outer.every=3", "--outer.momentum=0.6"]


def test_one_replica_is_the_inner_optimizer_bit_for_bit(one_rank: RankPool) -> None:
    common = [*COLA, *degrees()]
    expected = one_rank.run(train, common)[0]
    run = one_rank.run(train, [*common, *PLAIN, "--outer.every=1"])[0]
    assert largest_difference(run, expected) == 0.0
    moved = one_rank.run(train, [*common, "--outer.every=2"])[0]
    assert run["losses"][:2] == moved["losses"][:2] and run["losses"][2] != moved["losses"][2]


def build_sgd(parts: Any, config: Any, dims: Any) -> OptimizersContainer:
    return OptimizersContainer(parts, torch.optim.SGD, {"lr": config.lr})


def with_sgd(arguments: list[str]) -> dict[str, Any]:
    register_optimizer(OptimizerEntry("PlainSGD", build_sgd))
    try:
        return train([*arguments, "--optimizer.name=PlainSGD", "--optimizer.lr=0.5"])
    finally:
        del ENTRIES["PlainSGD"]


def test_sgd_apart_for_a_step_is_sgd_on_the_mean_gradient(two_ranks: RankPool) -> None:
    # Pairs: the ranks have different numbers of labels.
    options = [*COLA, *degrees(local_batch=4), REPLICAS, "--training.max_norm=inf"]
    options += ["--training.dataset=python_stdlib_docs", "--training.seq_len=64"]
    expected = two_ranks.run(with_sgd, options)[0]
    run = two_ranks.run(with_sgd, [*options, *PLAIN, "--outer.every=1"])[0]
    run["grad_norms"] = expected["grad_norms"]  # those of a replica's own gradients
    assert largest_difference(run, expected) < EXACT


def clipped_apart(max_norm: float) -> tuple[float, list[float], list[float]]:
    """Train by the trainer, and by torch's classes; return the difference, own and logged norms."""
    options = [*APART, *degrees(local_batch=4), f"--training.max_norm={max_norm}"]
    with small_trainer([*options, "--training.steps=7"]) as trainer:
        own = trained_parameters(*trainer.model_parts)
        twins = {n: torch.nn.Parameter(local_part(p).detach().double()) for n, p in own.items()}
        common = {name: torch.nn.Parameter(twin.detach().clone()) for name, twin in twins.items()}
        adamw = torch.optim.AdamW(twins.values(), betas=(0.9, 0.999), eps=1e-5, weight_decay=0.01)
        sgd = torch.optim.SGD(common.values(), lr=0.7, momentum=0.6, nesterov=True)
        clip, norms = trainer.gradients.clip, []

        def noted(largest: float, norm: Any) -> None:
            for name, twin in twins.items():
                gradient = own[name].grad
                assert gradient is not None
                twin.grad = local_part(gradient).double().clone()
            norms.append(float(torch.nn.utils.clip_grad_norm_(twins.values(), largest)))
            adamw.param_groups[0]["lr"] = trainer.optimizers.optimizers[0].param_groups[0]["lr"]
            adamw.step()
            clip(largest, norm)

        trainer.gradients.clip = noted
        batches = iter(trainer.dataloader)
        for step in range(1, 8):
            trainer.step = step
            trainer.train_step(batches)
            if step in (3, 6, 7):
                for name, weight in common.items():
                    weight.grad = weight.detach() - twins[name].detach()
                    dist.all_reduce(weight.grad)
                    weight.grad /= 2
                sgd.step()
                for name, weight in common.items():
                    twins[name].data.copy_(weight.data)
        gaps = [(local_part(own[n]) - twin).abs().max() for n, twin in twins.items()]
        folder = Path(trainer.job_config.job.dump_folder)
        logged = [record["grad_norm"] for record in read_history(folder / "metrics.jsonl")]
    return float(max(gaps)), norms, logged


def test_replicas_are_plain_models_with_norms_of_their_own(two_ranks: RankPool) -> None:
    (gap, norms, logged), (other_gap, others, _) = two_ranks.run(clipped_apart, 0.5)
    assert max(gap, other_gap) < 2e-6 and min(max(norms), max(others)) > 0.5
    largest = [*map(max, norms, others)]
    assert logged == pytest.approx(largest, rel=1e-6) and largest not in (norms, others)


def coded_apart() -> tuple[float, float]:
    """Exchange random changes; return this rank's difference from torch's SGD, and the residual's.

    Every rank simulates both replicas, with messages rounded by numpy.
    """
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    source = torch.Generator().manual_seed(0)
    start = torch.randn(300, generator=source, dtype=torch.float64)
    weight, common = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    outer = OuterSteps({"w": weight}, 1, Outer(every=3, bits=2, lr=0.7, momentum=0.8), mesh)
    sgd = torch.optim.SGD([common], lr=0.7, momentum=0.8, nesterov=True)
    replicas, owed = [start.clone(), start.clone()], [torch.zeros(300), torch.zeros(300)]
    for step in range(1, 10):
        for k in range(2):
            inner = 1e-2 * torch.randn(300, generator=source, dtype=torch.float64)
            replicas[k] += inner
            weight.data += inner * (k == rank)
        if step % 3 == 0:
            common.grad = torch.zeros_like(start)
            for k in range(2):
                change = common.detach() - replicas[k] + owed[k]
                sent = torch.from_numpy(rounded(change.numpy(), 2))
                owed[k] = change - sent
                common.grad += sent / 2
            sgd.step()
            replicas = [common.detach().clone(), common.detach().clone()]
        assert outer.after(step)
    gap = (weight - common).detach().abs().max()
    return float(gap), float((outer.residual["w"] - owed[rank]).abs().max())


def test_coded_messages_are_averaged_and_leave_each_replica_its_own_residual(
    two_ranks: RankPool,
) -> None:
    for gap, residual in two_ranks.run(coded_apart):
        assert gap < 1e-7 and residual < 1e-7


SAVED = 2  # half of the steps
SAVING = [*RUN, *APART, "--validation.dataset=training", "--validation.steps=1"]
SAVING += [f"--checkpoint.interval={SAVED}", "--outer.bits=4"]


def outer_bytes(rows: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    own = [row for row in rows if row["scope"] == "outer"]
    assert all(row["mesh_dim"] == "dp_replicate" for row in own)
    return [(row["op"], row["dtype"], row["elements"]) for row in own]


def test_a_resume_is_exact_and_bytes_are_those_of_exchanges(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    """Of coded messages; `test_layout` has those of 32 bits."""
    arguments, other = [*SAVING, *degrees(local_batch=4)], str(tmp_path / "other")
    ranks = two_ranks.run(layout_runs.examine, arguments, other, False)
    run = ranks[0]
    assert run["resumed"] == {"difference": 0.0, "logged": True}
    blocks = sum(-(-value.size // 128) for value in run["parameters"].values())
    sent = ("all_gather", "uint8", 2 * blocks * (64 + 4))
    for rank in ranks:
        assert rank["rejected"]["changed"] == [] and rank["rejected"]["trains"]
        found = [outer_bytes(rows) for rows in rank["sent"]]
        assert found == [[], [], [sent], [sent]]
        paper, dtypes = on_paper(arguments, 2)
        (stated,) = paper.outer.exchanges(0)
        own = [row for row in rank["sent"][2] if row["scope"] == "outer"]
        assert not differences(compare(own, [stated], dtypes))
        assert not [row for row in rank["sent"][0] if row["pass"] == "backward"]
    # Exchanges follow step 3 and the last one; the run was saved between them.
    records = read_history(Path(run["dump_folder"]) / "metrics.jsonl")
    for key, common in ((TRAIN_COMMON, [1, 0, 0, 1]), (VALIDATION_COMMON, [0, 0, 1, 1])):
        assert [record[key] for record in records if key in record] == common
    check_another_number(f"{other}/checkpoint/step-{SAVED}", two_ranks, four_ranks)


def check_another_number(step: str, two: RankPool, four: RankPool) -> None:
    """Replica k takes the saved replica k mod K, and no residual; the model is the common one."""
    options = [*SAVING, f"--checkpoint.initial_load_path={step}"]
    options.append("--checkpoint.no_initial_load_model_only")
    same = two.run(loaded, [*options, *degrees(local_batch=4)])
    replicas = "--parallelism.data_parallel_replicate_degree=4"
    more = four.run(loaded, [*options, *degrees(local_batch=2), replicas])
    for state in ("weights", "moments"):
        assert not same[0][state].equal(same[1][state])
        for k in range(4):
            assert more[k][state].equal(same[k % 2][state])
    for rank in (*same, *more):
        assert rank["common"].equal(rank["drawn"])  # before the first exchange
        assert not rank["residual"].any()


def loaded(arguments: list[str]) -> dict[str, Any]:
    """Return what this rank has loaded of one matrix."""
    with small_trainer(arguments) as trainer:
        name = "layers.0.attention.wq.A.weight"
        weight = trained_parameters(*trainer.model_parts)[name]
        drawn = local_part(weight).detach().clone()
        trainer.checkpointer.load(step=-1)
        (adamw,) = trainer.optimizers.optimizers
        return {
            "drawn": drawn,
            "weights": local_part(weight).detach().clone(),
            "moments": local_part(adamw.state[weight]["exp_avg"]).clone(),
            "common": local_part(trainer.outer.common[name]).clone(),
            "residual": local_part(trainer.outer.residual[name]).clone(),
        }


def spoilt_exchange() -> tuple[str, bool]:
    """Return what is raised if a replica has a NaN, and whether the common weights are kept."""
    with small_trainer([*APART, *degrees(local_batch=4)]) as trainer:
        batches, apply = iter(trainer.dataloader), trainer.apply
        weight = local_part(next(trainer.model_parts[0].parameters()))

        def spoil(verdict: Any) -> None:
            apply(verdict)
            if trainer.step == 3 and dist.get_rank() == 1:
                weight.data.view(-1)[0] = torch.nan

        trainer.apply = spoil
        before = [local_part(value).clone() for value in trainer.outer.common.values()]
        try:
            for trainer.step in (1, 2, 3):
                trainer.train_step(batches)
        except NonFiniteError as error:
            after = map(local_part, trainer.outer.common.values())
            return str(error), all(a.equal(b) for a, b in zip(before, after, strict=True))
    raise AssertionError("nothing was raised")


def test_what_is_not_finite_is_not_exchanged(two_ranks: RankPool) -> None:
    line = "step 3: an exchange of the replicas' weights is not finite; last good checkpoint: none"
    assert two_ranks.run(spoilt_exchange) == [(line, True)] * 2


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        *nightly(([], degrees(local_batch=2)), ([], degrees(tensor=2, local_batch=4))),
        (["--outer.fragments=2", "--outer.overlap"], degrees(pipeline=2, local_batch=4)),
    ],
    ids=["fsdp", "tensor", "pipeline-streaming"],
)
def test_layouts_inside_a_replica_change_nothing(
    more: list[str], layout: list[str], two_ranks: RankPool, four_ranks: RankPool
) -> None:
    expected = two_ranks.run(train, [*APART, *more, *degrees(local_batch=4)])[0]
    run = four_ranks.run(train, [*APART, *more, *layout])[0]
    assert largest_difference(run, expected) < EXACT


RICH = {
    "hsdp-muon-overlap": [  # a message is on its way when step 2 is saved
        *(*degrees(local_batch=2), "--optimizer.name=Muon"),
        *("--outer.every=2", "--outer.overlap"),
    ],
    "tensor": [  # whose ranks hold norms and gates alike
        *(*degrees(tensor=2, local_batch=4), "--parallelism.tp_plan=vanilla"),
        *("--model.name=llama_lax", "--low_rank.lax_gate=scalar", "--outer.every=2"),
    ],
    "pipeline-spectron": [
        *(*degrees(pipeline=2, local_batch=4), "--optimizer.name=Spectron"),
        *("--outer.bits=8", "--outer.no_feedback"),
    ],
}


@pytest.mark.parametrize(
    "more", [*[*RICH.values()][:2], *nightly(RICH["pipeline-spectron"])], ids=RICH.keys()
)
def test_fragments_resume_and_reject_in_layouts(
    more: list[str], four_ranks: RankPool, tmp_path: Path
) -> None:
    arguments, other = [*SAVING, *more, "--outer.fragments=2"], str(tmp_path / "other")
    for rank in four_ranks.run(layout_runs.examine, arguments, other, False):
        assert rank["resumed"]["logged"] and rank["resumed"]["difference"] == 0.0
        assert rank["rejected"]["changed"] == [] and rank["rejected"]["trains"]
