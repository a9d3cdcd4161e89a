# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Captured passes of a step give the eager ones' numbers, bit for bit.

On a CPU a recorder of operators stands for CUDA's graphs (tests/support/recorded_passes.py); ranks
are in tests/distributed/test_step_graph.py.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.trainers import BATCH, IGNORED, micro_batches, trainer_on
from tests.support.parity_runs import add_parity_flavors
from tests.support.recorded_passes import Recorder, recorded, trained
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.parallel.capture import why_eager
from torchtitan_lr.training.step_graph import CudaCapture, StepGraph

add_parity_flavors()
STEADY = ["--optimizer.lr=1e-2", "--training.steps=60"]
MIXED = "--training.mixed_precision_param=bfloat16"
ONE, THREE = (f"--training.global_batch_size={n * BATCH}" for n in (1, 3))
SPECTRAL = {name: [f"--optimizer.name={name}"] for name in ("Muon", "Spectron", "LoRAMuon")}
MODE = "--activation_checkpoint.mode="
SELECTIVE = [f"{MODE}selective", "--activation_checkpoint.selective_ac_option=op"]
TSR = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=4", "--optimizer.tsr_embedding_rank=4"]
TSR += [f"--optimizer.tsr_{name}refresh_interval=5" for name in ("", "embedding_")]
REJECTED = "a validation, then a rejected step"
VALIDATION = ["--validation.enable", "--validation.steps=1", "--validation.seq_len=8"]
RUNS = {
    "two micro-batches": [MIXED],
    "three": [MIXED, THREE],
    "one": [MIXED, ONE],
    "unwrapped": [],
    "full rank": [MIXED, "--model.name=llama_full"],
    "svd": [MIXED, "--model.name=llama_svd"],
    "lax": [MIXED, "--model.name=llama_lax"],
    REJECTED: [MIXED, "--training.max_skipped_steps=1", *VALIDATION],
    "lanes": [MIXED, "--model.name=llama_full", "--caat.lanes=4", "--caat.sync_fraction=0.5"],
    "low_rank": [MIXED, f"{MODE}low_rank"],
    "full": [f"{MODE}full"],
    "selective op": SELECTIVE,
    "selective 2": [*SELECTIVE[:1], "--activation_checkpoint.selective_ac_option=2"],
    "outer steps": [MIXED, "--outer.every=2"],
    "TSRAdam": [MIXED, *TSR],
    "TSRAdam, unwrapped": TSR,
    "TSRAdam, one-sided": [MIXED, *TSR, "--optimizer.tsr_projection=one_sided"],
    "TSRAdam, random start": [MIXED, *TSR, "--optimizer.tsr_start=random"],
    "Adam": [MIXED, "--optimizer.name=Adam"],
    "inputs kept": [MIXED, "--activation_checkpoint.keep_inputs=on"],
    "compiled": [MIXED, "--compile.enable"],
    "compiled, full": [MIXED, "--compile.enable", f"{MODE}full"],
    "compiled, selective": [MIXED, "--compile.enable", f"{MODE}selective"],
    **SPECTRAL,
}
CAPTURES = {"one": 1, "three": 3}
"""Kinds of pass, where they are not two: the first micro-batch and the last."""

USUAL = ("three", "TSRAdam", REJECTED)
"""What a CPU runs without ``--full``; a GPU runs all."""


def results(
    device: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[list[Tensor], int]:
    """What `trained` returns."""
    fused = [] if any("optimizer.name" in m for m in more) else ["--optimizer.implementation=fused"]
    with trainer_on(device, folder, monkeypatch, *STEADY, *fused, *more) as trainer:
        count = trainer.gradient_accumulation_steps
        batches = (micro_batches(trainer.model_args.vocab_size) * 2)[:count]

        def rolled(step: int) -> list[Any]:
            found = [({"input": i["input"].roll(step, 1)}, labels) for i, labels in batches]
            if step == 3 and trainer.job_config.validation.enable:
                trainer.validate()
                found = [(i, torch.full_like(labels, IGNORED)) for i, labels in found]
            return found

        found = trained(trainer, rolled)
        assert trainer.skipped_steps == trainer.job_config.training.max_skipped_steps
        return found


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_equal_eager_ones(
    name: str,
    device: torch.device,
    one_rank: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    arguments, off = RUNS[name], "--training.step_graph=off"
    if device.type == "cpu":
        if name.startswith("compiled"):
            pytest.skip("the recorder sees no operators of compiled code")
        if name not in USUAL and not request.config.getoption("--full"):
            pytest.skip("nightly: --full runs it")
        arguments = [*arguments, "--model.flavor=parity"]
    eager, passes = results(device.type, tmp_path / "a", monkeypatch, *arguments, off)
    assert passes == 0
    with recorded() if device.type == "cpu" else nullcontext():
        captured, passes = results(device.type, tmp_path / "b", monkeypatch, *arguments)
    assert passes == CAPTURES.get(name, 2)
    torch.testing.assert_close(captured, eager, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(eager[0], eager[1])


def test_a_later_pass_that_differs_is_named(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(loss=lambda loss: 1.0 * loss, gradient=lambda g: g, rows=BATCH)
    options = ["--model.flavor=parity", *STEADY]
    with recorded(), trainer_on("cpu", tmp_path, monkeypatch, *options) as trainer:
        loss_fn, one_pass, begin = trainer.loss_fn, trainer.one_pass, trainer.gradients.micro_batch
        weight = trainer.model_parts[0].output.weight

        def changed(tokens: Tensor, labels: Tensor, **others: Tensor) -> Tensor:
            return one_pass(tokens[: now.rows], labels[: now.rows], **others)

        def begun(last: bool) -> Any:
            if last:
                weight.grad = now.gradient(weight.grad)
            return begin(last)

        monkeypatch.setattr(trainer, "loss_fn", lambda *args: now.loss(loss_fn(*args)))
        monkeypatch.setattr(trainer, "one_pass", changed)
        monkeypatch.setattr(trainer.gradients, "micro_batch", begun)

        def step() -> None:
            trainer.step += 1
            trainer.train_step(iter(micro_batches(trainer.model_args.vocab_size)))

        def named(error: str, **differs: Any) -> None:
            usual = vars(now).copy()
            vars(now).update(differs)
            with pytest.raises(AssertionError, match=error):
                step()
            vars(now).update(usual)
            step()  # the control

        trainer.step = 1  # the first is logged
        for _ in range(2):
            step()
        named(r"^the host reads a tensor: aten._local_scalar_dense", loss=lambda x: x * x.item())
        monkeypatch.setattr(Recorder, "compares", True)
        step()
        named(r"^\['aten.neg.default', .* in the place of \['aten.mul.Tensor'", loss=lambda x: -x)
        named(r"^\['aten.mul.Tensor', .* 2.0\] in the place of .* 1.0\]$", loss=lambda x: 2.0 * x)
        named(r"in the place of \['aten.add_.Tensor', .*'address", gradient=lambda g: g.clone())
        named(r"in the place of \['aten.add_.Tensor', .*'address", gradient=lambda g: None)
        named(r"^\['aten.slice.Tensor', .* 1\] in the place of .* 2\]$", rows=1)


def test_a_pass_that_a_graph_does_not_take_ends_the_run_with_the_remedy(
    device: torch.device,
) -> None:
    def refuse(work: Any) -> Any:
        """What CUDA does at an operator that waits, and once more at the end of the capture."""
        try:
            raise RuntimeError("CUDA error: not permitted when stream is capturing\nSearch for")
        finally:
            raise RuntimeError("failed due to a previous error during capture")

    graph = StepGraph([], CudaCapture if device.type == "cuda" else lambda: refuse)
    inputs = {"x": torch.ones((), device=device)}
    for _ in range(2):
        graph.begin("shapes")
        graph.run(lambda x: x * x.item(), inputs, first=True, last=True)
    graph.begin("shapes")
    line = r"^the passes .* captured \(CUDA error: .*capturing\); training.step_graph = 'off' runs"
    with pytest.raises(RunFailedError, match=line) as raised:
        graph.run(lambda x: x * x.item(), inputs, first=True, last=True)
    assert "\n" not in str(raised.value) and isinstance(raised.value.__cause__, RuntimeError)


def test_a_step_of_another_shape_is_captured_by_itself(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model.flavor=parity", ONE]
    with recorded(), trainer_on("cpu", tmp_path, monkeypatch, *options) as trainer:
        (batch, *_) = micro_batches(trainer.model_args.vocab_size)
        short = {"input": batch[0]["input"][:1]}, batch[1][:1]
        trainer.step = 1
        assert trainer.graph is not None
        passes = []
        for given in [batch, batch, batch, short, short, short, batch]:
            trainer.step += 1
            trainer.train_step(iter([given]))
            passes.append(len(trainer.graph.passes))
        assert passes == [0, 0, 1, 1, 1, 2, 2]


def test_what_cannot_be_captured_is_refused(tmp_path: Path) -> None:
    config = build_job_config(["--training.step_graph=on", f"--job.dump_folder={tmp_path}"])
    with pytest.raises(ConfigError, match=r"training.step_graph: got 'on'.*CUDA graphs need a GPU"):
        check_job_config(config, 1, "cpu", data="none")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--training.step_graph=off", "is 'off'"),
        ("--parallelism.pipeline_parallel_degree=2", "pipeline's schedule"),
        ("--grad_compression.codec=sparse", "gradient codec"),
        ("--training.enable_cpu_offload", "copies through the host"),
        ("--training.mask_documents", "another mask"),
        ("--optimizer.name=TSRAdam", "tsr_overlap_buckets > 1"),  # alone it is captured
        (
            "--optimizer.name=TSRAdam --optimizer.tsr_overlap_buckets=1 --optimizer.tsr_stagger",
            "tsr_stagger finds new bases",
        ),
        (
            "--activation_checkpoint.mode=full --activation_checkpoint.preserve_rng_state",
            "random numbers' state",
        ),
        ("--parallelism.fsdp_reshard_after_forward=always", "another stream"),
    ],
)
def test_a_pass_that_cannot_be_captured_has_one_reason(arguments: str, reason: str) -> None:
    assert reason in why_eager(build_job_config(arguments.split()), 2, "cuda")
    assert why_eager(build_job_config([]), 2, "cuda") == ""
