# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Draw loss curves of tensor-parallel and single-process training (BOOST, Figure 4).

A small model trains three times on the same batches of the embedded corpus: in one process, with
bottleneck-aware tensor parallelism over T ranks, and in one process with another seed. If the plan
is exact, the first two curves differ only by rounding, far less than two seeds differ.

    python scripts/papers/loss_curves.py --out outputs/loss_curves/loss_curves.png
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.scaling.experiments import launch, step_records
from torchtitan_lr.training.figures import color_of, new_figure
from torchtitan_lr.training.summary import TRAIN_LOSS


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train, compare and draw; return 1 if the plan's gap is not below the seeds' gap."""
    options = _parse(argv)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    plan = f"--parallelism.tp_plan={options.plan}"
    degree = f"--parallelism.tensor_parallel_degree={options.ranks}"
    curves = {
        "T = 1": _train(options, "one", 1, []),
        f"T = {options.ranks}, {options.plan}": _train(
            options, "tp", options.ranks, [degree, plan]
        ),
        "T = 1, another seed": _train(options, "seed", 1, ["--debug.seed=1"]),
    }
    one, parallel, other = curves.values()
    gap, seeds = _gap(one, parallel), _gap(one, other)
    report = {
        "steps": len(one),
        "final_loss": {name: float(losses[-1]) for name, losses in curves.items()},
        "gap_to_tensor_parallel": gap,
        "gap_to_another_seed": seeds,
    }
    _draw(curves, report, out)
    print(json.dumps(report, indent=2))
    return 0 if gap < seeds else 1


def _train(options: argparse.Namespace, name: str, ranks: int, extra: list[str]) -> Any:
    """Run the launcher (or read a finished run's history) and return the losses, one per step."""
    folder = Path(options.work) / name
    if len(step_records(folder)) < options.steps:
        steps = f"--training.steps={options.steps}"
        warmup = f"--lr_scheduler.warmup_steps={options.steps // 10}"
        launch(options.config, folder, [steps, warmup, *extra, *options.overrides], ranks)
    return np.array([record[TRAIN_LOSS] for record in step_records(folder)])


def _gap(a: Any, b: Any) -> float:
    """Return the mean absolute difference of two curves, nats per token."""
    return float(np.abs(a - b).mean())


def _draw(curves: dict[str, Any], report: dict[str, Any], path: Path) -> None:

    figure = new_figure(7.2, 3.6)
    left, right = figure.subplots(1, 2)
    plan, seed = color_of("BTP"), color_of("another seed")
    styles: list[dict[str, Any]] = [
        {"color": color_of("one process"), "linewidth": 2.4},
        {"color": plan, "linestyle": "--", "linewidth": 1.1},
        {"color": seed, "linewidth": 0.7},
    ]
    for (name, losses), style in zip(curves.items(), styles, strict=True):
        left.plot(np.arange(1, len(losses) + 1), losses, label=name, **style)
    left.set_ylabel("training loss (nats per token)")
    one, parallel, other = curves.values()
    for losses, key, color in (
        (parallel, "gap_to_tensor_parallel", plan),
        (other, "gap_to_another_seed", seed),
    ):
        label = f"{key.replace('_', ' ')}: {report[key]:.1e} on average"
        difference = np.abs(one - losses) + 1e-9
        right.semilogy(np.arange(1, len(one) + 1), difference, color=color, lw=0.8, label=label)
    right.set_ylabel("difference to T = 1 (nats per token)")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("equal batches in one process and on T ranks", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_first(
        "config",
        "--config",
        default="train_configs/loss_curves.toml",
        help="the TOML file of the model",
    )
    parser.add_argument("--steps", type=int, default=800, help="steps per run")
    parser.add_argument("--ranks", type=int, default=4, help="tensor-parallel degree T")
    parser.add_argument("--plan", default="btp", help="parallelism.tp_plan of the T ranks")
    parser.add_argument("--work", default="outputs/loss_curves", help="folder of the runs")
    parser.add_argument("--out", default="outputs/loss_curves/loss_curves.png", help="the PNG")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, steps=10, ranks=2)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
