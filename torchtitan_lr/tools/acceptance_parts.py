# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of the acceptance on one GPU: their commands, and what is read from them.

Text and tokenizer come with this package, so nothing is downloaded. The models keep the flavors'
vocabulary sizes.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.tools.acceptance import Job, Part, SkippedError
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.summary import SUMMARY_FILE

OFFLINE = (
    "--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k",
    "--training.dataset=python_stdlib",
    "--validation.no_enable",
    "--checkpoint.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
)
"""Overrides with which a TOML for C4 trains without a network."""

TOKENS_PER_S = "throughput/tokens_per_s"

LAUNCH = (sys.executable, "-m", "torchtitan_lr.launch")

_MODES = {"cola_1b": ("none", "selective", "full", "low_rank"), "full_1b": ("none", "full")}


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


def make_parts(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> list[Part]:
    """Return all parts, in the order in which they run.

    Args:
        scale: `FULL` or `TINY`.
        machine: What `torchtitan_lr.tools.machine` found; its ``missing`` lists requirements of
            pyproject.toml that are not installed.
        root: The repository.
        work: A folder for the runs' outputs.
    """
    no_gpu = "no GPU here" if scale.device == "cuda" and not machine["devices"] else ""
    makers = (_main, _smoke, _tests, _speed, _memory, _tsr, _block, _peers)
    parts = []
    for make in makers:
        part = make(scale, machine, root, work)
        jobs = [replace(job, why_not=no_gpu or job.why_not) for job in part.jobs]
        parts.append(replace(part, jobs=jobs))
    return parts


def _main(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    folder = work / "main"
    shell = scale.device == "cuda" and not machine.get("missing")
    start = ["./run_llama_train.sh"] if shell else list(LAUNCH)
    job = Job(
        name="NGPU=1",
        command=[*start, f"--job.dump_folder={folder}", *scale.main],
        read=partial(read_run, folder),
        limit=240,
        variables={"NGPU": "1", **({"PYTHON": sys.executable} if shell else {}), **_on(scale)},
    )
    columns = {
        "steps": "steps",
        "train_loss": "train loss",
        "val_loss": "validation loss",
        "tokens_per_s": "tokens/s",
        "peak_memory_gib": "peak GiB",
        "note": "chosen by the launcher",
    }
    return Part("main", "The main job on one GPU", [job], columns)


def _smoke(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    why_not = "a rehearsal starts no shell scripts" if scale.device == "cpu" else ""
    if machine.get("missing"):
        why_not = f"requirements of pyproject.toml are {machine['missing']}"
    job = Job(
        name="smoke_4gpu.sh",
        command=["bash", "scripts/smoke_4gpu.sh"],
        read=read_smoke,
        limit=180,
        variables={"PYTHON": sys.executable},
        why_not=why_not,
    )
    return Part(
        "smoke", "The smoke on the GPUs of this machine", [job], {"note": "chosen by the launcher"}
    )


def _tests(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", scale.tests, "-q", "-p"]
    job = Job("pytest", [*command, "no:cacheprovider"], read_pytest, 300, _on(scale))
    return Part("tests", "The tests of GPUs", [job], {"passed": "passed", "skipped": "skipped"})


def _speed(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    jobs = []
    for seq_len, batch in scale.shapes:
        for compiled in (False, True)[: 1 + scale.compiled]:
            for model in ("full", "cola"):
                name = f"{model} {seq_len}×{batch} {'compiled' if compiled else 'eager'}"
                folder = work / name.replace(" ", "_").replace("×", "x")
                command = [
                    *LAUNCH,
                    f"--job.config_file=train_configs/{model}_1b.toml",
                    f"--job.dump_folder={folder}",
                    *OFFLINE,
                    *_shape(seq_len, batch),
                    *(f"--training.steps={scale.steps}", f"--metrics.log_freq={scale.log_freq}"),
                    *("--lr_scheduler.warmup_steps=1", "--activation_checkpoint.mode=none"),
                    f"--compile.{'' if compiled else 'no_'}enable",
                    *scale.model,
                ]
                read = partial(read_speed, folder)
                jobs.append(Job(name, command, read, 180, {"NGPU": "1", **_on(scale)}))
    columns = {
        "tokens_per_s": "tokens/s",
        "spread": "spread %",
        "step_ms": "ms per step",
        "mfu": "MFU %",
        "peak_memory_gib": "peak GiB (reserved)",
    }
    return Part("speed", "CoLA-1B against full-rank 1B, one whole step", jobs, columns)


def _memory(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    seq_len, batch = scale.shapes[-1]
    jobs = []
    for config, modes in _MODES.items():
        for mode in modes if scale.device == "cuda" else modes[:1]:
            command = [
                *(sys.executable, "scripts/check/check_gpu_memory.py"),
                *(f"train_configs/{config}.toml", "--json", *OFFLINE, *_shape(seq_len, batch)),
                *(f"--activation_checkpoint.mode={mode}", *scale.model),
            ]
            variables = {"NGPU": "1", **_on(scale)}
            jobs.append(Job(f"{config} {mode}", command, read_memory, 120, variables))
    columns = {
        "estimated_gib": "estimated GiB",
        "measured_gib": "measured GiB (allocated)",
        "error": "error %",
    }
    title = f"Activation checkpointing against the estimate, {seq_len}×{batch}, eager"
    return Part("memory", title, jobs, columns)


def _tsr(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    command = [sys.executable, "scripts/check/bench_tsr_gpu.py", "--flavors", "350M", "1B"]
    jobs = [Job("bench_tsr_gpu.py", command, read_json, 180, _on(scale))]
    return Part("tsr", "TSR-Adam's step against fused AdamW's", jobs)


def _block(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    jobs = []
    for name, arguments in scale.block.items():
        command = [sys.executable, "scripts/check/bench_block.py", *arguments, "--json"]
        command += ["--compile"] * (name == "compiled")
        jobs.append(Job(f"bench_block.py {name}", command, read_block, 240, _on(scale)))
    return Part("block", "One decoder block of a split model, as rank 0 of T", jobs)


def _peers(scale: Scale, machine: dict[str, Any], root: Path, work: Path) -> Part:
    script = "scripts/check/bench_peers.py"
    why_not = "" if (root / script).is_file() else f"there is no {script}"
    if scale.device == "cpu":
        why_not = why_not or "its own tests rehearse it"
    command = [sys.executable, script, "--json"]
    jobs = [Job("bench_peers.py", command, read_json, 300, _on(scale), why_not)]
    return Part("peers", "Our models against torchtitan's and transformers'", jobs)


def _on(scale: Scale) -> dict[str, str]:
    """Return the variables that keep a rehearsal on the CPU."""
    return {"CUDA_VISIBLE_DEVICES": ""} if scale.device == "cpu" else {}


def _shape(seq_len: int, batch: int) -> tuple[str, ...]:
    return (
        f"--training.seq_len={seq_len}",
        f"--training.local_batch_size={batch}",
        f"--training.global_batch_size={batch}",
    )


def read_run(folder: Path, said: str) -> dict[str, Any]:
    """Return the summary of a run, see `torchtitan_lr.training.summary.build_summary`.

    Args:
        folder: Its dump folder.
        said: Its output; a line on the ranks that the launcher chose becomes ``note``.
    """
    values: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return values | {"note": _chosen(said)}


def read_speed(folder: Path, said: str) -> dict[str, Any]:
    """Return tokens/s, their spread, milliseconds per step, MFU and peak memory of a run.

    Args:
        folder: Its dump folder.
        said: Its output.

    Returns:
        Medians over the logged windows without the first; ``spread`` is the range of tokens/s in
        percent of the median.
    """
    values = read_run(folder, said)
    windows = [r for r in read_history(folder / HISTORY_FILE) if TOKENS_PER_S in r][1:]
    speeds = [record[TOKENS_PER_S] for record in windows]
    if not speeds:
        raise ValueError(f"{folder / HISTORY_FILE} has one window or none")
    seconds = median(record["time_metrics/end_to_end(s)"] for record in windows)
    return {
        "tokens_per_s": median(speeds),
        "spread": 100 * (max(speeds) - min(speeds)) / median(speeds),
        "step_ms": 1e3 * seconds,
        "mfu": values["mfu"],
        "peak_memory_gib": values["peak_memory_gib"],
    }


def read_smoke(said: str) -> dict[str, Any]:
    """Return the launcher's line on its ranks; the script's own checks decide."""
    if "smoke passed" not in said:
        raise ValueError("'smoke passed' is missing")
    return {"note": _chosen(said)}


def _chosen(said: str) -> str:
    """Return the launcher's line on the ranks and degrees that it chose, if any."""
    found = re.search(r"^(no GPU here|\d+ (GPU|rank)s?\b[^:]*): training .*$", said, re.MULTILINE)
    return found[0] if found else ""


def read_pytest(said: str) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped.

    Raises:
        SkippedError: All tests were skipped.
        ValueError: There is no summary.
    """
    lines = [line for line in said.splitlines() if re.search(r"\bin [\d.]+s\b", line)]
    if not lines:
        raise ValueError("pytest printed no summary")
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    found = {name: counts.get(name, 0) for name in ("passed", "failed", "skipped")}
    found["errors"] = counts.get("errors", counts.get("error", 0))
    if found["skipped"] and not found["passed"] + found["failed"] + found["errors"]:
        reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", said, re.MULTILINE)
        raise SkippedError(reasons[0] if reasons else "all tests were skipped")
    return found | {"wrong": lines[-1].strip("= ")}


def read_memory(said: str) -> dict[str, Any]:
    """Return the estimated and the measured peak of ``check_gpu_memory.py --json``."""
    found = json.loads(said)
    estimated, measured = found["estimated"]["peak"], found["measured"]
    error = 100 * (estimated / measured - 1)
    return {
        "estimated_gib": estimated / 2**30,
        "measured_gib": measured / 2**30,
        "error": error,
        "parts_gib": {name: size / 2**30 for name, size in found["estimated"].items()},
        "wrong": f"the estimate is {error:+.1f}% off, more than 10%",
    }


def read_block(said: str) -> dict[str, Any]:
    """Return the table of ``bench_block.py --json``."""
    found = json.loads(said)
    ceiling = found["matmul_tflops"]
    rows = [
        {"variant": name, **row, "of_ceiling": 100 * row["tflops"] / ceiling}
        for name, row in found["variants"].items()
    ]
    headings = {
        "variant": "variant",
        "forward_ms": "forward ms",
        "forward_backward_ms": "forward + backward ms",
        "tflops": "TFLOP/s",
        "of_ceiling": "% of the product's",
        "activation_mib": "activations MiB",
    }
    return {"matmul_tflops": ceiling, "table": {"headings": headings, "rows": rows}}


def read_json(said: str) -> dict[str, Any]:
    """Return all numbers of a nested JSON object, named by their paths, as a table."""
    found = json.loads(said)
    rows = [{"quantity": name, "value": value} for name, value in _numbers(found)]
    headings = {"quantity": "quantity", "value": "value"}
    return {"table": {"headings": headings, "rows": rows}, "raw": found}


def _numbers(found: Any, path: str = "") -> list[tuple[str, float]]:
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(found, dict):
        items = list(found.items())
    elif isinstance(found, list):
        items = list(enumerate(found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        return [(path, found)]
    return [row for key, value in items for row in _numbers(value, f"{path}.{key}".strip("."))]
