# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parts of ``scripts/first_contact.sh``, each with a time limit, and their report."""

import argparse
import gzip
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.checkpoints.run_record import commit
from torchtitan_lr.console.terminal import text_table

TRAIN = [sys.executable, "-m", "torchtitan_lr", "train"]
QUIET = ["--metrics.no_enable_wandb", "--metrics.no_enable_tensorboard", "--metrics.log_freq=1"]
FP32 = ["--training.mixed_precision_param=float32", "--compile.no_enable"]
P = "--parallelism."


@dataclass
class Contact:
    """A machine, the folder of its report, and what the parts found."""

    ranks: int
    small: bool  # a rehearsal: CPU processes, and the debug model in the place of the large one
    out: Path
    deadline: float = math.inf  # of the part that runs, on the clock of `time.monotonic`
    failed: list[str] = field(default_factory=list)

    def run(self, command: list[str], ranks: int) -> str:
        """Run a command of the package on some ranks; return its output, which a log has too."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.small else {}
        environment = os.environ | {"NGPU": str(ranks), "OMP_NUM_THREADS": "1"} | hidden
        left = None if math.isinf(self.deadline) else self.deadline - time.monotonic()
        if left is not None and left <= 0:  # the rows of a part go on after one that took it all
            raise TimeoutError("its part's time is over")
        with (self.out / "commands.log").open("a+") as log:
            print(f"$ NGPU={ranks} {' '.join(command)}", file=log, flush=True)
            begins = log.tell()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                status = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                raise TimeoutError("its part's time is over") from None
            finally:
                end(process)  # Ctrl-C did not reach it
            log.seek(begins)
            said = log.read().strip()
        if status:
            raise RuntimeError(f"status {status}: {said.splitlines()[-1] if said else ''}")
        return said

    def trained(self, config: str, name: str, ranks: int, *more: str) -> list[Any]:
        """Train in a folder of the report; return the records of its steps."""
        folder = self.out / name
        options = [f"--job.dump_folder={folder}", *QUIET, *more]
        self.run([*TRAIN, config, *options], ranks)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss_metrics/global_avg_loss" in row]

    def row(self, name: str, cells: Callable[[], list[str]]) -> list[str]:
        """Return a row of a table, which says so where its two cells cannot be had."""
        try:
            return [name, *cells()]
        except (RuntimeError, OSError, ValueError, KeyError) as error:  # the other rows follow
            self.failed.append(f"{name}: {error}")
            return [name, "FAILED", "-"]


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process if it runs; on SIGTERM the launcher and torchrun end their ranks."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def layouts(ranks: int) -> Iterator[tuple[str, list[str]]]:
    """Yield layouts of the debug model that these ranks can have, with their overrides."""
    # Not context parallelism, whose kernels on a GPU have no fp32.
    degrees = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
    degrees["replicas"] = "data_parallel_replicate"
    every = {name: f"{P}{key}_degree=1" for name, key in degrees.items()}
    yield f"fsdp {ranks}", [*every.values()]
    for name, key in degrees.items():
        if ranks % 2 == 0:
            own = every | {name: f"{P}{key}_degree=2"}
            more = [f"{P}pipeline_parallel_schedule=1F1B"] if name == "pp" else []
            yield f"{name} 2, fsdp {ranks // 2}", [*own.values(), *more]


def parity(contact: Contact) -> str:
    """Compare losses and gradient norms of every layout with those of one device, in fp32."""
    fixed = ["--training.steps=5", "--training.global_batch_size=16", "--validation.no_enable"]
    fixed += ["--checkpoint.no_enable", *FP32, f"{P}pipeline_parallel_microbatch_size=1"]
    single = [f"{P}tensor_parallel_degree=1", f"{P}data_parallel_replicate_degree=1"]
    one = contact.trained("debug_cola", "parity/one", 1, *fixed, *single)
    local = f"--training.local_batch_size={max(1, 16 // contact.ranks)}"

    def furthest(name: str, overrides: list[str]) -> list[str]:
        folder = "parity/" + name.replace(", ", "-").replace(" ", "")
        found = contact.trained("debug_cola", folder, contact.ranks, *fixed, *overrides, local)
        far = []
        for key in ("loss_metrics/global_avg_loss", "grad_norm"):
            pairs = zip(one, found, strict=True)
            far.append(max(abs(a[key] - b[key]) / abs(a[key]) for a, b in pairs))
        if not max(far) < 1e-4:
            contact.failed.append(f"{name} differs from one device")
        return [f"{x:.1e}" for x in far]

    rows = []
    for name, overrides in layouts(contact.ranks):
        rows.append(contact.row(name, partial(furthest, name, overrides)))
    return text_table(["5 steps, fp32, relative", "loss", "gradient norm"], rows)


def counted(contact: Contact) -> str:
    """Compare the bytes of a step with the formulas."""
    command = [sys.executable, "-m", "torchtitan_lr", "measure-comm", "debug_cola"]
    said = contact.run(command, contact.ranks)
    return "all rows agree with the formulas\n" + said.splitlines()[-1]


def bandwidths(contact: Contact) -> str:
    """Measure products, memory and links, and write them as a hardware file."""
    file = contact.out / "here.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={contact.ranks}", "-m", "scripts.bench.calibrate"]
    # Messages as large as those of a large model; a tensor beyond the cache of a GPU.
    size = ["--megabytes=4", "--repeats=3"] if contact.small else ["--megabytes=256"]
    contact.run([*command, *size, "--out", str(file)], contact.ranks)
    lines = [line for line in file.read_text().splitlines() if "=" in line]
    lines.append("inter_node_gbytes_per_s is assumed to be that within this machine")
    estimate = [sys.executable, "-m", "torchtitan_lr", "estimate", model(contact)]
    estimate += [f"--world={contact.ranks}", f"--hardware={file}", *large(contact)]
    said = contact.run(estimate, 1).splitlines()[-1]
    return "\n".join([*lines, f"torchtitan-lr estimate {model(contact)} --hardware {file}:", said])


def hidden_share(trace: Path) -> tuple[float, float]:
    """Return the seconds of communication kernels in a trace, and the share beside others."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    sent: list[tuple[float, float]] = []
    computed: list[tuple[float, float]] = []
    for event in events:
        if event.get("cat") == "kernel":
            interval = (event["ts"], event["ts"] + event["dur"])
            (sent if "nccl" in event["name"].lower() else computed).append(interval)
    computed = merged(computed)
    total = covered = 0.0
    for begin, end in merged(sent):
        total += end - begin
        for first, last in computed:
            covered += max(0.0, min(end, last) - max(begin, first))
    return total / 1e6, covered / total if total else 0.0


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as intervals that do not meet."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap(contact: Contact) -> str:
    """Profile a step of the large model under FSDP, and under BTP."""
    if contact.small:
        return "not on CPUs: gloo's messages are no kernels"

    def profiled(tp: int) -> list[str]:
        profile = ["--profiling.enable_profiling", "--profiling.profile_freq=8"]
        more = [*large(contact), f"{P}tensor_parallel_degree={tp}", "--training.steps=9", *profile]
        more.append("--checkpoint.no_enable")  # a save's messages are no part of a step
        contact.trained(model(contact), f"overlap/tp{tp}", contact.ranks, *more)
        folder = contact.out / f"overlap/tp{tp}"
        (trace,) = folder.rglob("*rank0_trace.json*")
        seconds, share = hidden_share(trace)
        return [f"{seconds:.3f}", f"{share:.0%}"]

    rows = [contact.row(name_of(contact, tp), partial(profiled, tp)) for tp in (1, 2)]
    return text_table(["cola 1B_boost", "communication (s)", "beside computation"], rows)


def name_of(contact: Contact, tp: int) -> str:
    """Return the name of a layout of the large model."""
    shard = f"fsdp {contact.ranks // tp}"
    return shard if tp == 1 else "btp 2" + f", {shard}" * (contact.ranks > 2)


def model(contact: Contact) -> str:
    """Return the name of the large model's configuration."""
    return "debug_cola" if contact.small else "cola_1b"


def large(contact: Contact) -> list[str]:
    """Return the overrides of the large model, whose widths two ranks divide."""
    if contact.small:
        return ["--validation.no_enable"]
    fixed = ["--model.flavor=1B_boost", "--training.dataset=cpython", "--training.seq_len=1024"]
    fixed += ["--training.local_batch_size=4", "--training.global_batch_size=64"]
    return [*fixed, "--validation.no_enable"]


def resumed(contact: Contact) -> str:
    """Train to two thirds of the steps, and go on with tensor parallelism over two ranks."""
    steps = 9 if contact.small else 30
    first = steps * 2 // 3
    fixed = [*large(contact), "--checkpoint.interval=1000", f"--lr_scheduler.total_steps={steps}"]
    for tp, last in ((1, first), (2, steps)):
        more = [f"{P}tensor_parallel_degree={tp}", f"--training.steps={last}"]
        rows = contact.trained(model(contact), "resume", contact.ranks, *fixed, *more)
    losses = [row["loss_metrics/global_avg_loss"] for row in rows]
    if len(rows) != steps:
        raise RuntimeError(f"{len(rows)} steps are logged, not {steps}: it did not resume")
    if not 2 * losses[first] < losses[0] + losses[first - 1]:
        contact.failed.append(f"step {first + 1} has not the loss of a run that goes on")
    speeds = [row["throughput/tokens_per_s"] for row in rows]
    table = []
    for tp, last in ((1, first), (2, steps)):
        cells = [f"{losses[last - 1]:.4f} at step {last}", f"{speeds[last - 1]:,.0f} tokens/s"]
        table.append([name_of(contact, tp), *cells])
    head = [f"{model(contact)}: {losses[0]:.4f} at step 1", "loss", "speed"]
    return text_table(head, table)


# With the seconds that each may take on GPUs: ten minutes in all.
PARTS: dict[str, tuple[Callable[[Contact], str], float]] = {
    "Every layout trains as one device does": (parity, 180),
    "Bytes are those of the formulas": (counted, 40),
    "This machine": (bandwidths, 90),
    "A run resumes in another layout": (resumed, 160),
    "What hides behind computation": (overlap, 130),
}
SLOWER = 5  # times as long on a CPU


def machine(contact: Contact) -> str:
    """Describe where this ran."""
    device = platform.processor() or platform.machine()
    if not contact.small:
        device = torch.cuda.get_device_name()
    return f"{contact.ranks} x {device}; torch {torch.__version__}; commit {commit()}"


def main() -> int:
    """Run all parts; print and write the page; return 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/first_contact"))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    # The largest power of two: the ranks share 16 rows.
    ranks = 4 if args.small else min(8, 1 << torch.cuda.device_count().bit_length() >> 1)
    if ranks < 2:
        parser.error("this machine has fewer than two GPUs; --small rehearses on CPUs")
    if args.out.exists():
        parser.error(f"{args.out} is there; --out names another folder")
    args.out.mkdir(parents=True)
    contact = Contact(ranks, args.small, args.out)
    page = [f"# First contact\n\n{machine(contact)}\n"]
    for title, (part, seconds) in PARTS.items():
        began = time.monotonic()
        contact.deadline = began + seconds * (SLOWER if contact.small else 1)
        try:
            text = part(contact)
        except Exception as error:  # the other parts run
            text = f"FAILED: {type(error).__name__}: {error}"
            contact.failed.append(f"{title}: {error}")
        page.append(f"## {title}\n\n```text\n{text}\n```\n\n{time.monotonic() - began:.0f} s\n")
        print(page[-1], flush=True)
        (args.out / "report.md").write_text("\n".join(page))  # so far
    page.append("\n".join(contact.failed) or "All parts passed.")
    (args.out / "report.md").write_text("\n".join(page) + "\n")
    print(f"{args.out / 'report.md'}: {', '.join(contact.failed) or 'all parts passed'}")
    return 1 if contact.failed else 0


if __name__ == "__main__":
    sys.exit(main())
