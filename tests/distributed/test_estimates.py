# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Estimates against four ranks: bytes sent, bytes held, and what autograd keeps."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.training import small_trainer
from tests.support.checkpointing import checkpointing
from tests.support.nightly import nightly
from tests.support.parity_cases import Case, build_model, model_args, shard_model, tp_mesh
from tests.support.parity_runs import BF16, TINY, degrees, model, schedule
from tests.support.rank_pool import RankPool
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import SPECTRAL
from torchtitan_lr.costs.comparison import compare, differences
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.held_memory import static_memory
from torchtitan_lr.costs.rank_memory import rehearse_run, repeated_by_block
from torchtitan_lr.costs.rehearsal import Workload, rehearse
from torchtitan_lr.costs.step_traffic import bytes_by_dim, step_traffic
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import resolve_settings

FULL_AC = ["--activation_checkpoint.mode=full"]
LOW_RANK_AC = ["--activation_checkpoint.mode=low_rank"]
VANILLA = ["--parallelism.tp_plan=vanilla"]
TSR = [
    "--optimizer.name=TSRAdam",
    "--optimizer.tsr_rank=8",
    "--optimizer.tsr_embedding_rank=4",
]
HSDP2X2 = ["--parallelism.data_parallel_replicate_degree=2"]
REPLICATE2 = [*HSDP2X2, "--parallelism.data_parallel_shard_degree=1"]
RUNS: dict[str, list[str]] = {
    "fsdp4": [*model("full"), *degrees(local_batch=2)],
    "fsdp4_accumulating": [*model("cola"), *degrees(local_batch=1), *BF16],
    "btp_fsdp2": [*model("cola"), *degrees(tensor=2, local_batch=4), *BF16, *LOW_RANK_AC],
    "vanilla_fsdp2": [*model("lax"), *degrees(tensor=2, local_batch=4), *VANILLA, *FULL_AC],
    "btp_every_second_block": [
        *(*model("lax"), *degrees(tensor=2, local_batch=2), *BF16),
        *(
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=2",
        ),
    ],
    "pp2_fsdp2": [*model("lax"), *degrees(pipeline=2, local_batch=4)],
    "pp2_tp2": [
        *model("cola"),
        *degrees(tensor=2, pipeline=2),
        *schedule("Interleaved1F1B"),
        *FULL_AC,
    ],
    "tsr_fsdp2_replicate2": [
        *(*model("full"), *degrees(local_batch=2), *TSR),
        "--parallelism.data_parallel_replicate_degree=2",
    ],
    "tsr_tp2_fsdp2": [*model("full"), *degrees(tensor=2, local_batch=4), *TSR],
    "tagc_fsdp4": [
        *(*model("full"), *degrees(local_batch=1)),
        *("--grad_compression.codec=sketch", "--grad_compression.auto"),
    ],
    # Accumulating: sums over replicas run at the end of the last round alone.
    "pp2_replicate2": [*model("lax"), *degrees(pipeline=2, local_batch=2), *REPLICATE2],
    "pp2_hsdp2x2": [
        *(*model("cola"), *degrees(pipeline=2, local_batch=1)),
        *(*schedule("GPipe"), *HSDP2X2),
    ],
}
HALF = "--training.mixed_precision_reduce=bfloat16"
RUNS |= {
    "pp2_fsdp2_half": [*RUNS["pp2_fsdp2"], HALF],
    "tagc_fsdp4_half": [*RUNS["tagc_fsdp4"], HALF],
}
MUON, SPECTRON, LORA_MUON = ([f"--optimizer.name={name}"] for name in SPECTRAL)
RUNS |= {
    # Along r: half of the square matrices' sides, and the shorter sides of w2, wk and wv.
    "muon_full_fsdp4": [*model("full"), *degrees(local_batch=2), *MUON],
    "muon_cola_btp_fsdp2": [*model("cola"), *degrees(tensor=2, local_batch=4), *MUON],
    "spectron_fsdp4_bf16": [
        *(*model("cola"), *degrees(local_batch=1), *BF16, *SPECTRON),
        "--training.dtype=bfloat16",
    ],
    "spectron_vanilla_fsdp2": [
        *(*model("svd"), *degrees(tensor=2, local_batch=4), *VANILLA, *SPECTRON),
    ],
    "lora_muon_pp2_fsdp2": [*model("lax"), *degrees(pipeline=2, local_batch=4), *LORA_MUON],
    "lora_muon_hsdp2x2": [*model("cola"), *degrees(local_batch=2), *HSDP2X2, *LORA_MUON],
    "lora_muon_btp4": [*model("cola"), *degrees(tensor=4), *LORA_MUON],
}
EIGHT_RANKS = ["pp2_hsdp2x2"]
"""Names of the runs that have more than four."""


def measure(arguments: list[str]) -> dict[str, Any]:
    """Take one step on this rank; return the ledger's bytes, and those of the real tensors."""
    import gc

    import torch.distributed as dist

    with small_trainer(arguments) as trainer:
        batches = iter(trainer.dataloader)
        trainer.step = 1
        with trainer.new_ledger() as ledger:
            trainer.train_step(batches)
        sent: dict[str, dict[str, int]] = {}
        for row in ledger.rows():
            if row["scope"] != "step":
                ops = sent.setdefault(row["mesh_dim"], {})
                ops[row["op"]] = ops.get(row["op"], 0) + row["bytes"]
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [s for o in trainer.optimizers.optimizers for s in o.state.values()]
        tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        dims = trainer.parallel_dims
        meshes = {n: dims.get_optional_mesh(n) for n in ("pp", "fsdp")}
        result = {
            "rows": ledger.rows(),
            "sent": sent,
            "weights": bytes_of(parameters),
            "gradients": bytes_of(gradients),
            "optimizer": bytes_of(tensors),
            "names": sorted(n for part in trainer.model_parts for n, _ in part.named_parameters()),
            **{name: 0 if m is None else m.get_local_rank() for name, m in meshes.items()},
        }
    del trainer, parameters, gradients, states, tensors
    gc.collect()
    dist.barrier()
    return result


def bytes_of(tensors: list[Any]) -> int:
    """Bytes of this rank's parts, each once however many share it."""
    parts = [t._local_tensor if hasattr(t, "_local_tensor") else t for t in tensors]
    seen = {(p.data_ptr(), p.numel() or id(p)): p.numel() * p.element_size() for p in parts}
    return sum(seen.values())


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """The same runs on paper."""
    found = {}
    for name, arguments in RUNS.items():
        config = build_job_config([*TINY, *arguments])
        world = 8 if name in EIGHT_RANKS else 4
        check_job_config(config, world, "cpu", on_paper=True)
        found[name] = read_run(config, world)
    return found


@pytest.fixture(scope="module")
def measured(four_ranks: RankPool, eight_ranks: RankPool) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks measured, by name of the run."""
    return cache(
        lambda name: (eight_ranks if name in EIGHT_RANKS else four_ranks).run(measure, RUNS[name])
    )


SELDOM = ("fsdp4", "pp2_fsdp2", "pp2_replicate2", "tsr_tp2_fsdp2")
SELDOM += ("pp2_hsdp2x2", "fsdp4_accumulating", "tagc_fsdp4")
SELDOM += ("spectron_vanilla_fsdp2", "lora_muon_pp2_fsdp2", "lora_muon_btp4", "lora_muon_hsdp2x2")
USUAL = [*(name for name in RUNS if name not in SELDOM), *nightly(*SELDOM)]


@pytest.mark.parametrize("name", USUAL)
def test_bytes_sent(name: str, runs: dict[str, Run], measured: Any) -> None:
    run = runs[name]
    rehearsal = rehearse_run(run)
    for rank in measured(name):
        traffic = step_traffic(run, rank["pp"], rehearsal)
        traffic = [row for row in traffic if row.scope != "step"]
        assert rank["sent"] == bytes_by_dim(traffic, run.wire_dtypes)
        # The control: another dtype on the wire is noticed.
        wrong = run.wire_dtypes | dict.fromkeys(("activation", "parameter"), "float64")
        assert rank["sent"] != bytes_by_dim(traffic, wrong)


OF_SPECTRAL = ("muon_full_fsdp4", "muon_cola_btp_fsdp2")
OF_SPECTRAL_SELDOM = ("spectron_vanilla_fsdp2", "lora_muon_btp4", "lora_muon_hsdp2x2")


@pytest.mark.parametrize("name", [*OF_SPECTRAL, *nightly(*OF_SPECTRAL_SELDOM)])
def test_every_row_of_a_spectral_step(name: str, runs: dict[str, Run], measured: Any) -> None:
    """Also which mesh dimensions a message spans, and that it is one."""
    run, rows = runs[name], measured(name)[0]["rows"]
    assert any(row["scope"] == "optimizer" for row in rows)
    assert differences(compare(rows, step_traffic(run, 0), run.wire_dtypes)) == []


CHECKPOINTED = ("btp_fsdp2", "vanilla_fsdp2", "btp_every_second_block")


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_every_row_under_checkpointing(name: str, runs: dict[str, Run], measured: Any) -> None:
    """Which block sends what again; low_rank repeats nothing under btp, the others do."""
    run, rows = runs[name], measured(name)[0]["rows"]
    once = [row for row in step_traffic(run, 0) if row.scope != "step"]
    repeated = repeated_by_block(run)
    assert differences(compare(rows, [*once, *repeated], run.wire_dtypes)) == []
    scopes = {row["scope"] for row in differences(compare(rows, once, run.wire_dtypes))}
    assert scopes == {row.scope for row in repeated}
    assert (
        scopes
        == {
            "btp_fsdp2": set(),
            "vanilla_fsdp2": {"block 0", "block 1"},
            "btp_every_second_block": {"block 1"},
        }[name]
    )


@pytest.mark.parametrize("name", USUAL)
def test_bytes_held(name: str, runs: dict[str, Run], measured: Any) -> None:
    run = runs[name]
    for rank in measured(name):
        parts = [
            {n: s for unit in run.stages[stage].values() for n, s in unit.items()}
            for stage in run.stages_of(rank["pp"])
        ]
        tsr = None if run.tsr is None else run.tsr_plans
        own = tsr, rank["fsdp"], run.spectral_vectors, run.by_columns
        expected = static_memory(parts, run.shard, run.precision, *own)
        held = {part: rank[part] for part in expected}
        if run.tsr is not None:  # it drops the gradients of compressed matrices in a step
            assert held.pop("gradients") <= expected.pop("gradients")
        assert held == expected
        # The controls: the whole model, and the other optimizer.
        assert rank["weights"] < static_memory([run.global_shapes], 1, run.precision)["weights"]
        adamw = static_memory(parts, run.shard, run.precision)["optimizer"]
        if run.tsr is not None or (run.spectral and run.precision.parameter == 4):
            assert rank["optimizer"] < adamw


PLANS = [
    Case("cola", TPSettings("btp"), degree=2, dtype=torch.float32),
    Case("lax", TPSettings("btp", comm="sequence"), degree=2, dtype=torch.bfloat16),
    Case("lax", TPSettings("vanilla"), degree=2, dtype=torch.float32),
    Case("full", TPSettings("megatron"), degree=2, dtype=torch.bfloat16),
]
MODES = ("none", "selective op", "full", "low_rank")


def saved_on_rank(case: Case) -> dict[str, int]:
    """Real bytes that outlive a forward pass with its loss, by mode, on this rank."""
    from torch.distributed.tensor import DTensor

    from tests.support.parity_cases import BATCH, TOKENS
    from torchtitan_lr.costs.rehearsal import LivingStorages

    tp_mesh(case.degree)
    found = {}
    for mode in MODES:
        if mode == "low_rank" and case.family == "full":
            continue
        part = build_model(case, shard_model(case))
        checkpointing(mode)(part)
        tokens = torch.ones(BATCH, TOKENS, dtype=torch.long)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in part.parameters()]
        outside = {t.untyped_storage()._cdata for t in (*local, part.freqs_cis, tokens)}
        packed: dict[int, int] = {}

        def pack(x: torch.Tensor, packed: dict[int, int] = packed) -> torch.Tensor:
            inner = x.to_local() if isinstance(x, DTensor) else x
            packed[inner.untyped_storage()._cdata] = inner.untyped_storage().nbytes()
            return x

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        with LivingStorages(outside) as living, hooks:
            loss = part(tokens, targets=tokens)
            found[mode] = living.bytes() - loss.untyped_storage().nbytes()
        if mode == "none":
            found["packed"] = sum(n for a, n in packed.items() if a not in outside)
        del loss, part, local, packed
    return found


@pytest.mark.parametrize("case", [PLANS[1], *nightly(PLANS[0], *PLANS[2:])], ids=str)
def test_saved_activations(case: Case, two_ranks: RankPool) -> None:
    from tests.support.parity_cases import BATCH, TOKENS

    found = two_ranks.run(saved_on_rank, case)[0]
    args = model_args(case)
    settings = resolve_settings(case.settings, args, case.degree, TOKENS)
    estimates = {}
    for mode in found.keys() - {"packed"}:
        workload = Workload(args, settings, case.degree, BATCH, TOKENS, case.dtype)
        part = rehearse(workload, checkpointing(mode))
        estimates[mode] = args.n_layers * part.block + part.ends
        assert estimates[mode] == pytest.approx(found[mode], rel=0.05)
    # What outlives the forward pass is what autograd was given to keep.
    assert estimates["none"] == pytest.approx(found["packed"], rel=0.05)
    # The control: one mode's estimate is not another's.
    assert estimates["none"] != pytest.approx(found["full"], rel=0.05)
