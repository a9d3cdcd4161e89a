# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Draw loss over bytes sent between replicas, for AdamW, GaLore and TSR-Adam.

A small model trains on two replicas with each optimizer and each seed, on equal tokens. The ledger
counts the bytes sent, including refreshes and dense parameters. Finished runs are reused and an
interrupted run resumes from its last checkpoint, so the script can be restarted at any time.

    python scripts/papers/tsr_loss_vs_bytes.py --out outputs/tsr_loss_vs_bytes/loss.png
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from torchtitan_lr.commands.parser import OneLineParser, in_one_line, overrides_of
from torchtitan_lr.scaling.experiments import last_value, launch, step_records
from torchtitan_lr.training.figures import color_of, new_figure
from torchtitan_lr.training.summary import TRAIN_LOSS, VALIDATION_LOSS

SENT = "comm_bytes/dp_replicate"

TSR = ["--optimizer.name=TSRAdam"]
METHODS: dict[str, list[str]] = {
    "AdamW": ["--optimizer.name=AdamW", "--optimizer.lr=3e-3"],
    # GaLore as published: one-sided, dense embedding, unchanged moments, scale 0.25. But the bases
    # come from sketches and take the signs of the previous ones.
    "GaLore": [
        *TSR,
        "--optimizer.tsr_projection=one_sided",
        "--optimizer.tsr_embedding_rank=0",
        "--optimizer.tsr_moments=keep",
        "--optimizer.tsr_scale=0.25",
    ],
    "TSR keep": [*TSR, "--optimizer.tsr_moments=keep"],
    "TSR rotate": [*TSR, "--optimizer.tsr_moments=rotate"],
    "TSR reset": [*TSR, "--optimizer.tsr_moments=reset"],
}


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train the missing runs, report and draw."""
    options = _parse(argv)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    runs = {
        method: [_train(options, method, seed) for seed in range(options.seeds)]
        for method in options.methods
    }
    report = {method: _summarize(of_seeds) for method, of_seeds in runs.items()}
    _draw(runs, out)
    print(json.dumps(report, indent=2))
    return 0


def _train(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Run the launcher, or read a finished run, and return the curves of losses and bytes."""
    folder = Path(options.work) / f"{method.replace(' ', '_')}-{seed}"
    if len(step_records(folder)) < options.steps:
        arguments = [
            f"--training.steps={options.steps}",
            f"--lr_scheduler.warmup_steps={options.steps // 10}",
            f"--debug.seed={seed}",
            f"--optimizer.tsr_seed={seed}",
            "--checkpoint.enable",
            f"--checkpoint.interval={max(1, options.steps // 4)}",
            "--checkpoint.keep_latest_k=2",
            *METHODS[method],
            *options.overrides,
        ]
        launch(options.config, folder, arguments, ranks=2)
    return _curve(folder)


def _curve(folder: Path) -> dict[str, Any]:
    records, validation = step_records(folder), last_value(folder, VALIDATION_LOSS)
    return {
        "loss": np.array([record[TRAIN_LOSS] for record in records]),
        "bytes": np.array([record[SENT] for record in records], dtype=float),
        "validation": float("nan") if validation is None else validation,
    }


def _summarize(of_seeds: list[dict[str, Any]]) -> dict[str, float]:
    losses = [run["validation"] for run in of_seeds]
    return {
        "validation_loss": mean(losses),
        "validation_loss_std": stdev(losses) if len(losses) > 1 else 0.0,
        "bytes_per_step": mean(float(run["bytes"].mean()) for run in of_seeds),
        "peak_bytes": max(float(run["bytes"].max()) for run in of_seeds),
        "total_bytes": mean(float(run["bytes"].sum()) for run in of_seeds),
    }


def _smooth(losses: Any, window: int) -> Any:
    """Return the mean over a trailing window, which is shorter at the start."""
    sums = np.cumsum(np.insert(losses, 0, 0.0))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:

    figure = new_figure(7.2, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for method, of_seeds in runs.items():
        for seed, run in enumerate(of_seeds):
            loss = _smooth(run["loss"], max(1, len(run["loss"]) // 30))
            style: dict[str, Any] = {"color": color_of(method), "lw": 1.0, "alpha": 0.8}
            label = method if seed == 0 else None
            left.semilogx(np.cumsum(run["bytes"]) / 1e6, loss, label=label, **style)
            right.plot(np.arange(1, len(loss) + 1), loss, **style)
    left.set_xlabel("MB sent between replicas, cumulative")
    right.set_xlabel("step")
    left.set_ylabel("training loss (nats per token)")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle("untuned learning rates, a line per seed", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_first(
        "config",
        "--config",
        default="train_configs/tsr_curves.toml",
        help="the TOML file of the model",
    )
    parser.add_argument("--steps", type=int, default=200, help="steps per run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), help="which to run"
    )
    parser.add_argument("--work", default="outputs/tsr_loss_vs_bytes", help="folder of the runs")
    parser.add_argument("--out", default="outputs/tsr_loss_vs_bytes/loss.png", help="the PNG")
    parser.add_argument(
        "--override", nargs="*", default=[], metavar="KEY=VALUE", help="older spelling of overrides"
    )
    options = parser.parse_with_overrides(argv)
    options.overrides += overrides_of(options.override)
    parser.check_at_least(options, steps=10, seeds=1)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
