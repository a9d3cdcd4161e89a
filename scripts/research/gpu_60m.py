# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Train the families of scripts/research/experiments/gpu_60m.toml on one GPU within a time limit.

    python -m scripts.research.gpu_60m corpus --work outputs/gpu_60m        # anywhere, minutes
    python -m scripts.research.gpu_60m tokens --work outputs/gpu_60m        # on CPU cores
    python -m scripts.research.gpu_60m run --work outputs/gpu_60m --out outputs/gpu_60m.json
    python -m scripts.research.gpu_60m run --work W --device cpu --small    # a rehearsal

A rehearsal needs --small in each command.

corpus writes the Python source of the installed packages into corpus.jsonl.xz, a document per file
without copies, and trains a tokenizer of 16,384 tokens. corpus.json has the SHA-256 of the list of
packages, versions, files and their contents. These three are what another machine needs. tokens
writes the prepared corpus: one file in 200 is held out. It needs no GPU: other work may have that.
run probes the slowest family, chooses one number of steps with which all seven fit into --seconds,
at most one epoch, and trains one after another. --out has all curves and is written again every
few seconds; a family whose run has begun and not ended is "cut off" there. The same command goes
on.

Exit status: 0; 1 a run failed or was cut off; 2 invalid arguments.
"""

import hashlib
import json
import lzma
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from scripts.research.finished_runs import versions
from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.commands.scaling import execute
from torchtitan_lr.config.files import read_json
from torchtitan_lr.console.terminal import text_table
from torchtitan_lr.data.corpus import Corpus
from torchtitan_lr.errors import require
from torchtitan_lr.experiments.experiment import Experiment, read_experiment
from torchtitan_lr.experiments.plan import Plan
from torchtitan_lr.experiments.sweep import Point, Sweep, read_results
from torchtitan_lr.launch.run_folder import FINISHED
from torchtitan_lr.training.history import HISTORY_FILE, read_history, train_loss

EXPERIMENT = Path(__file__).parent / "experiments" / "gpu_60m.toml"
SLOWEST = "full-Muon"  # its products are of whole matrices
EVERY = 5.0  # seconds between two writes of the curves
SPARE = 0.9  # share of the time that the runs plan for

CHOSEN = ("seconds_to_start", "seconds_per_step", "steps")

TEXT, LISTED, TOKENIZER, TOKENS = "corpus.jsonl.xz", "corpus.json", "bpe", "tokens"
"""What --work holds."""

SMALL = [
    "training.local_batch_size=2",
    "training.global_batch_size=4",
    "training.seq_len=32",
    "training.mixed_precision_param=float32",
    "validation.local_batch_size=2",
    "validation.seq_len=32",
    "validation.steps=2",
    "compile.enable=false",
    "metrics.log_freq=1",
    "optimizer.tsr_rank=32",
]
"""Settings of a rehearsal."""


@dataclass(frozen=True)
class Scale:
    """How large a run is, or its rehearsal."""

    files: int | None  # of the corpus, all if None
    vocabulary: int
    flavor: str
    overrides: list[str]
    probe: int  # steps, about five seconds
    most: int | None  # steps of a run


WHOLE = Scale(None, 16384, "60M", [], 30, None)
REHEARSAL = Scale(150, 512, "debug", SMALL, 3, 4)


def sources() -> Iterator[tuple[str, bytes]]:
    """Yield the Python files of the installed packages by name: package, version and path."""
    packages = {item.metadata["Name"].lower(): item for item in metadata.distributions()}
    for name, package in sorted(packages.items()):
        for file in sorted(package.files or [], key=str):
            path = Path(str(file.locate()))
            if file.suffix == ".py" and ".." not in file.parts and path.is_file():
                yield f"{name} {package.version} {file}", path.read_bytes()


def write_corpus(work: Path, scale: Scale) -> None:
    """Write the text, its list and its tokenizer."""
    work.mkdir(parents=True, exist_ok=True)
    listed, seen, size = hashlib.sha256(), set[bytes](), 0
    with lzma.open(work / TEXT, "wt", encoding="utf-8", preset=6) as out:
        for name, content in sources():
            key = hashlib.sha256(content).digest()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            if key in seen or not text.strip():
                continue
            seen.add(key)
            listed.update(f"{name} {key.hex()}\n".encode())
            size += len(content)
            out.write(json.dumps({"text": text}) + "\n")
            if len(seen) == scale.files:
                break
    found = {"sha256": listed.hexdigest(), "files": len(seen), "bytes": size}
    write_whole(work / LISTED, json.dumps(found) + "\n")
    print(f"{len(seen):,} files, {size:,} bytes, SHA-256 {found['sha256']}")
    source = ["--corpus", "local", "--path", str(work / TEXT)]
    size_of = ["--vocab_size", str(scale.vocabulary)]
    command("tokenizer", *source, *size_of, "--out", str(work / TOKENIZER))


def write_tokens(work: Path) -> None:
    """Prepare the corpus."""
    tokenizer = str(work / TOKENIZER)
    command("prepare", str(work / TEXT), "--tokenizer", tokenizer, "--out", str(work / TOKENS))


def command(*arguments: str) -> None:
    """Run a command of the package; its refusal is this command's."""
    done = subprocess.run([sys.executable, "-m", "torchtitan_lr", *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


class Race:
    """The runs of a folder, and the file of their curves."""

    def __init__(self, work: Path, out: Path, scale: Scale) -> None:
        rows = [
            "training.dataset=prepared",
            f"training.dataset_path={work / TOKENS}",
            f"model.hf_assets_path={work / TOKENIZER}",
            f"model.vocab_size={scale.vocabulary}",
        ]
        given = read_experiment(str(EXPERIMENT), [*scale.overrides, *rows])
        ((self.size, shape),) = given.sizes.items()
        given.sizes[self.size] = replace(shape, flavor=scale.flavor)
        self.work, self.out, self.scale = work, out, scale
        (work / "runs").mkdir(exist_ok=True)
        self.plan = Plan(given, work / "runs")
        self.arm = self.plan.arms[given.reference, self.size]
        self.points: list[Point] = []
        self.facts: dict[str, Any] = versions() | {"corpus": read_json(work / LISTED)}

    def with_steps(self, steps: int) -> Experiment:
        """Return the experiment with a number of steps."""
        given = self.plan.experiment
        budget = steps * self.arm.tokens_per_step / self.arm.counted
        shape = replace(given.sizes[self.size], budgets=[budget])
        return replace(given, sizes={self.size: shape})

    def choose_steps(self, end: float) -> int:
        """Probe the slowest family; return the steps with which all runs end before a time.

        A run that goes on has the steps that it had.
        """
        if self.out.exists():
            known = read_json(self.out)
            if known.get("corpus") == self.facts["corpus"] and "steps" in known:
                self.facts |= {key: known[key] for key in CHOSEN}
                return int(known["steps"])
        self.plan.experiment = self.with_steps(self.scale.probe)
        (budget,) = self.plan.experiment.sizes[self.size].budgets
        (rate,) = self.plan.experiment.families[SLOWEST].learning_rates
        point = self.plan.point(SLOWEST, self.size, budget, 0, rate)
        probed, began = self.work / "probe", time.monotonic()
        shutil.rmtree(probed, ignore_errors=True)  # an earlier probe's time is not this one's
        probed.mkdir()
        Sweep(probed, [point]).run()
        wall = time.monotonic() - began
        require(point.row["status"] == FINISHED, "probe", point.row["status"], "a run that ends")
        step = self.arm.tokens_per_step / point.row["tokens_per_s"]
        start = wall - self.scale.probe * step
        share = SPARE * (end - time.monotonic()) / len(self.plan.experiment.families)
        epoch = Corpus.open(self.work / TOKENS, "--work").tokens() // self.arm.tokens_per_step
        steps = min(int((share - start) / step), epoch, self.scale.most or epoch)
        want = f"more: seven runs of {start:.0f} s to start and {step:.3f} s a step do not fit"
        require(steps > 0, "--seconds", end - began, want)
        self.facts |= dict(zip(CHOSEN, (start, step, steps), strict=True))
        print(f"{steps} steps each: {start:.1f} s to start, {step:.3f} s a step", flush=True)
        return steps

    def write(self) -> None:
        """Write what is known of all runs."""
        runs = {}
        read_results(self.plan.work, self.points)
        for point in self.points:
            history = read_history(self.plan.work / point.name / HISTORY_FILE)
            curve = [(each["step"], train_loss(each)) for each in history]
            curve = [(step, loss) for step, loss in curve if loss is not None]
            row = {key: value for key, value in point.row.items() if value is not None}
            if row["status"] not in (FINISHED, "to do", "diverged", "failed"):
                row["status"] = "cut off"
            runs[str(point.settings["family"])] = row | {"curve": curve}
        write_whole(self.out, json.dumps(self.facts | {"runs": runs}, indent=1) + "\n")

    def run(self, end: float) -> int:
        """Train all families, and write their curves on the way; return the exit status."""
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # the active run saves and ends
        signal.setitimer(signal.ITIMER_REAL, max(1.0, end - time.monotonic()))
        self.plan.experiment = self.with_steps(self.choose_steps(end))
        self.points = self.plan.points(self.plan.searched({}))
        done = threading.Event()

        def keep_writing() -> None:
            while not done.wait(EVERY):
                self.write()

        writer = threading.Thread(target=keep_writing, daemon=True)
        writer.start()
        try:
            status = execute(self.plan, jobs=1)
        except KeyboardInterrupt:
            status = 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            done.set()
            writer.join()
            self.write()
        rows = []
        for family, run in read_json(self.out)["runs"].items():
            last = run["curve"][-1] if run["curve"] else (0, math.nan)
            loss = run.get("val_loss", math.nan)
            rows.append([family, run["status"], str(last[0]), f"{last[1]:.4f}", f"{loss:.4f}"])
        print(text_table(("family", "status", "step", "loss", "validation loss"), rows, left=2))
        return status


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Make the corpus, its tokens, or train; return the exit status."""
    began = time.monotonic()
    parser = OneLineParser(prog="scripts.research.gpu_60m", description=__doc__)
    parser.add_argument("command", choices=("corpus", "tokens", "run"), help="what to do")
    parser.add_argument("--work", type=Path, required=True, help="folder of corpus and runs")
    parser.add_argument("--out", type=Path, help="run: the file of all curves")
    parser.add_argument("--seconds", type=float, default=600.0, help="run: from now to the end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="run: where")
    parser.add_argument("--small", action="store_true", help="a rehearsal: the debug model")
    options = parser.parse_args(argv)
    scale, work = REHEARSAL if options.small else WHOLE, options.work.resolve()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.command == "corpus":
        write_corpus(work, scale)
    elif options.command == "tokens":
        write_tokens(work)
    else:
        want = "cpu with --small: this machine shows no GPU"
        require(options.device == "cpu" or torch.cuda.is_available(), "--device", "cuda", want)
        return Race(work, options.out or work / "gpu_60m.json", scale).run(began + options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
