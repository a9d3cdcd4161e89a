# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of the acceptance on one GPU: their commands, and what is read from them.

Text and tokenizer come with this package, so nothing is downloaded. The models keep the flavors'
vocabulary sizes.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_lr.formulas.papers.published import COLA_H100_1B

from scripts.bench.acceptance import Job, Part
from scripts.bench.acceptance_readers import (
    read_block,
    read_json,
    read_memory,
    read_pytest,
    read_run,
    read_smoke,
    read_speed,
)

OFFLINE = (
    "--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k",
    "--training.dataset=python_stdlib",
    "--validation.no_enable",
    "--checkpoint.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
)
"""Overrides with which a TOML for C4 trains without a network."""

LAUNCH = (sys.executable, "-m", "torchtitan_lr", "train")

_MODES = {"cola_1b": ("none", "selective", "full", "low_rank"), "full_1b": ("none", "full")}

_CHOSEN = {"note": "chosen by the launcher"}


@dataclass(frozen=True)
class Scale:
    """How large the acceptance is.

    Args:
        name: ``full`` on a GPU, ``tiny`` for a rehearsal on a CPU.
        main: Overrides of the main job.
        shapes: Sequence lengths and batches whose speed is measured.
        compiled: Whether compiled models are measured too.
        steps: Training steps per measurement of speed.
        log_freq: Steps per logged window; the first window is not counted.
        model: Overrides of the 1B models.
        tests: What pytest runs.
        block: Arguments of ``bench_block.py``, one list per job.
        device: ``cuda`` or ``cpu``.
    """

    name: str
    main: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    compiled: bool
    steps: int
    log_freq: int
    model: tuple[str, ...]
    tests: str
    block: dict[str, tuple[str, ...]]
    device: str


FULL = Scale(
    name="full",
    main=(),
    shapes=((256, 64), (4096, 4)),
    compiled=True,
    steps=40,
    log_freq=10,
    model=(),
    tests="tests/gpu",
    block={"eager": ("--flavor=7B", "--ranks=4"), "compiled": ("--flavor=7B", "--ranks=4")},
    device="cuda",
)

TINY = Scale(
    name="tiny",
    main=(
        *("--training.steps=2", "--training.seq_len=16", "--training.local_batch_size=2"),
        *("--lr_scheduler.warmup_steps=1", "--validation.no_enable", "--metrics.log_freq=1"),
        "--checkpoint.no_enable",
    ),
    shapes=((16, 2),),
    compiled=False,
    steps=3,
    log_freq=1,
    model=("--model.flavor=debug",),
    tests="tests/gpu/test_gpu_all_reduce.py",
    block={
        "eager": (
            *("--device=cpu", "--flavor=debug", "--ranks=2", "--batch=1", "--seq_len=16"),
            *("--dtype=float32", "--steps=2", "--warmup=1", "--only=btp_c"),
        )
    },
    device="cpu",
)


@dataclass(frozen=True)
class Site:
    """Where the acceptance runs.

    Args:
        scale: `FULL` or `TINY`.
        machine: What `torchtitan_lr.scaling.machine` found; its ``missing`` says which requirements
            of pyproject.toml are not installed.
        root: The repository.
        work: A folder for the runs' outputs.
    """

    scale: Scale
    machine: dict[str, Any]
    root: Path
    work: Path

    @property
    def variables(self) -> dict[str, str]:
        """The variables that keep a rehearsal on the CPU."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.scale.device == "cpu" else {}


def make_parts(site: Site) -> list[Part]:
    """Return all parts, in the order in which they run.

    Args:
        site: Where they run.
    """
    no_gpu = ""
    if site.scale.device == "cuda" and not site.machine["devices"]:
        no_gpu = "no GPU here"
    parts = []
    for make in (_main, _smoke, _tests, _speed, _memory, _tsr, _block, _peers):
        part = make(site)
        jobs = [replace(job, why_not=no_gpu or job.why_not) for job in part.jobs]
        parts.append(replace(part, jobs=jobs))
    return parts


def _main(site: Site) -> Part:
    folder = site.work / "main"
    shell = site.scale.device == "cuda" and not site.machine.get("missing")
    start = ["./run_llama_train.sh"] if shell else list(LAUNCH)
    variables = {"NGPU": "1", **site.variables}
    job = Job(
        name="NGPU=1",
        command=[*start, f"--job.dump_folder={folder}", *site.scale.main],
        read=partial(read_run, folder),
        limit=240,
        variables=variables | ({"PYTHON": sys.executable} if shell else {}),
    )
    columns = {
        "steps": "steps",
        "train_loss": "train loss",
        "val_loss": "validation loss",
        "tokens_per_s": "tokens/s",
        "peak_memory_gib": "peak GiB",
    }
    return Part("main", "The main job on one GPU", [job], columns | _CHOSEN)


def _smoke(site: Site) -> Part:
    why_not = "a rehearsal starts no shell scripts" if site.scale.device == "cpu" else ""
    if site.machine.get("missing"):
        why_not = f"requirements of pyproject.toml: {site.machine['missing']}"
    command, variables = ["bash", "scripts/smoke_4gpu.sh"], {"PYTHON": sys.executable}
    job = Job("smoke_4gpu.sh", command, read_smoke, 180, variables, why_not)
    return Part("smoke", "The smoke on the GPUs of this machine", [job], _CHOSEN)


def _tests(site: Site) -> Part:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", site.scale.tests, "-q"]
    command += ["-p", "no:cacheprovider"]
    job = Job("pytest", command, read_pytest, 300, site.variables)
    return Part("tests", "The tests of GPUs", [job], {"passed": "passed", "skipped": "skipped"})


def _speed(site: Site) -> Part:
    jobs = []
    for seq_len, batch in site.scale.shapes:
        for compiled in (False, True)[: 1 + site.scale.compiled]:
            for model in ("full", "cola"):
                jobs.append(_run(site, model, seq_len, batch, compiled, "none"))
    if site.scale.device == "cuda":
        jobs += [_run(site, "full", 256, 64, False, "full")]
        jobs += [_run(site, "cola", 256, 64, False, "low_rank")]
    columns = {
        "tokens_per_s": "tokens/s",
        "spread": "spread %",
        "step_ms": "ms per step",
        "mfu": "MFU %",
        "peak_memory_gib": "peak GiB (reserved)",
        "published": "published tokens/s (H100)",
    }
    return Part("speed", "CoLA-1B against full-rank 1B, whole steps", jobs, columns)


def _run(site: Site, model: str, seq_len: int, batch: int, compiled: bool, mode: str) -> Job:
    """Return a training run whose speed is measured."""
    name = f"{model} {seq_len}×{batch} {'compiled' if compiled else 'eager'}"
    name += {"none": ""}.get(mode, f", checkpointing {mode}")
    folder = site.work / "_".join(name.replace("×", " ").replace(",", "").split())
    command = [
        *(*LAUNCH, f"--job.config_file=train_configs/{model}_1b.toml"),
        *(f"--job.dump_folder={folder}", *OFFLINE, *_shape(seq_len, batch)),
        *(f"--training.steps={site.scale.steps}", "--lr_scheduler.warmup_steps=1"),
        *(f"--metrics.log_freq={site.scale.log_freq}", f"--activation_checkpoint.mode={mode}"),
        *(f"--compile.{'' if compiled else 'no_'}enable", *site.scale.model),
    ]
    published = None
    if (seq_len, batch) == (256, 64):
        # CoLA's Table 9 has Hugging Face's models, which are not compiled.
        rows = {"full none": "full", "full full": "GCP", "cola none": "CoLA"}
        row = (rows | {"cola low_rank": "CoLA-M"})[f"{model} {mode}"]
        published = None if compiled else COLA_H100_1B[row][0]
    read = partial(read_speed, folder, published)
    return Job(name, command, read, 180, {"NGPU": "1", **site.variables})


def _memory(site: Site) -> Part:
    seq_len, batch = site.scale.shapes[-1]
    jobs = []
    for config, modes in _MODES.items():
        for mode in modes if site.scale.device == "cuda" else modes[:1]:
            command = [
                *(sys.executable, "scripts/check/check_gpu_memory.py"),
                *(f"train_configs/{config}.toml", "--json", *OFFLINE, *_shape(seq_len, batch)),
                *(f"--activation_checkpoint.mode={mode}", *site.scale.model),
            ]
            variables = {"NGPU": "1", **site.variables}
            jobs.append(Job(f"{config} {mode}", command, read_memory, 120, variables))
    columns = {
        "estimated_gib": "estimated GiB",
        "measured_gib": "measured GiB (allocated)",
        "error": "error %",
    }
    title = f"Activation checkpointing against the estimate, {seq_len}×{batch}, eager"
    return Part("memory", title, jobs, columns)


def _tsr(site: Site) -> Part:
    command = [sys.executable, "scripts/check/bench_tsr_gpu.py", "--flavors", "350M", "1B"]
    jobs = [Job("bench_tsr_gpu.py", command, read_json, 180, site.variables)]
    return Part("tsr", "TSR-Adam's step against fused AdamW's", jobs)


def _block(site: Site) -> Part:
    jobs = []
    for name, arguments in site.scale.block.items():
        command = [sys.executable, "scripts/check/bench_block.py", *arguments, "--json"]
        command += ["--compile"] * (name == "compiled")
        jobs.append(Job(f"bench_block.py, {name}", command, read_block, 300, site.variables))
    return Part("block", "One decoder block of a split model, as rank 0 of T", jobs)


def _peers(site: Site) -> Part:
    script = "scripts/check/bench_peers.py"
    why_not = "" if (site.root / script).is_file() else f"there is no {script}"
    if site.scale.device == "cpu":
        why_not = why_not or "its own tests rehearse it"
    command = [sys.executable, script, "--json", "--device=cuda", "--dtype=bfloat16"]
    command += ["--flavor=350M", "--batch=64", "--seq_len=256"]
    command += ["--models", "full", "titan", "transformers", "cola", "published"]
    jobs = [Job("bench_peers.py", command, read_json, 300, site.variables, why_not)]
    return Part("peers", "Our models against torchtitan's and transformers'", jobs)


def _shape(seq_len: int, batch: int) -> tuple[str, ...]:
    return (
        f"--training.seq_len={seq_len}",
        f"--training.local_batch_size={batch}",
        f"--training.global_batch_size={batch}",
    )
