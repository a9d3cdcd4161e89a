# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Draw the loss of training with compressed gradients (TAGC, Figure 4).

A small llama_full trains on the embedded corpus, with equal steps and batches: uncompressed, and at
2x, 4x and 10x with the sketch, with the sparse codec, and with the sketch whose 1-bit index is
summed as published. If a sketch does not peel at the published sparsity, theta is raised and shown
in the table. The summed index loses entries that two ranks send and corrupts entries in the same
cells: compare each sum1 run with the sketch of its level. The loss is largest at 2x, where most
entries overlap; that may be why the paper's highest curve is its 2x run with this index.

    python scripts/papers/tagc_loss.py --ranks 2,4 --out outputs/tagc_loss/tagc_loss.png
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.compression.sizes import LEVELS
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.scaling.experiments import launch
from torchtitan_lr.training.figures import color_of, new_figure
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.summary import TRAIN_LOSS, VALIDATION_LOSS

KINDS = {"sketch": ("sketch", "exact"), "sparse": ("sparse", "exact"), "sum1": ("sketch", "sum1")}


def cases(kinds: list[str], levels: list[str]) -> dict[str, list[str]]:
    """Return the arguments of every run by name."""
    runs = {"dense": ["--grad_compression.codec=none"]}
    for kind in kinds:
        codec, index = KINDS[kind]
        for level in levels:
            runs[f"{kind} {level}"] = [
                f"--grad_compression.codec={codec}",
                f"--grad_compression.index={index}",
                f"--grad_compression.level={level}",
                "--grad_compression.auto",
            ]
    return runs


def train(options: argparse.Namespace, name: str, ranks: int, extra: list[str]) -> list[Any]:
    """Run the launcher (or read a finished run's history) and return the records."""
    folder = Path(options.work) / f"{ranks} {name}".replace(" ", "_")
    history = folder / HISTORY_FILE
    if not any(VALIDATION_LOSS in r and r["step"] == options.steps for r in read_history(history)):
        arguments = [
            f"--training.steps={options.steps}",
            f"--training.global_batch_size={options.batch}",
            f"--training.local_batch_size={options.batch // ranks}",
            f"--lr_scheduler.warmup_steps={options.steps // 10}",
            f"--validation.freq={options.steps}",
            *("--metrics.log_freq=1", "--checkpoint.no_enable"),
            *("--grad_compression.layers=all", *extra, *options.overrides),
        ]
        launch(options.config, folder, arguments, ranks)
    return read_history(history)


def row(name: str, ranks: int, records: list[Any], dense: float) -> dict[str, Any]:
    """Return a summary of a run."""
    kind, _, level = name.partition(" ")
    final = [r[VALIDATION_LOSS] for r in records if VALIDATION_LOSS in r][-1]
    found: dict[str, Any] = {"ranks": ranks, "run": name, "validation_loss": final}
    found["increase_percent"] = 100 * (final / dense - 1)
    if not level:
        return found | {"theta": 0.0, "raised": False, "bits": 32.0}
    # Late: it imports torch, and --help needs none.
    from torchtitan_lr.compression.codecs import CODECS, codec_bits

    codec, index = KINDS[kind]
    c, theta = LEVELS[level]
    section = SimpleNamespace(auto=True, index=index)
    sizes = CODECS[codec].resolve(section, c, theta, ranks)
    bits = sum(codec_bits(sizes).values())
    steps = [r for r in records if TRAIN_LOSS in r]
    for key in ("unpeeled_share", "index_collisions"):
        found[key] = sum(r[f"grad_compression/{key}"] for r in steps) / len(steps)
    return found | {"theta": sizes.theta, "raised": sizes.theta > theta, "bits": bits}


def as_text(rows: list[dict[str, Any]]) -> str:
    """Format the table; collisions are per step."""
    header = ["ranks", "run", "theta", "bits", "validation loss", "vs dense", "collisions"]
    lines = []
    for r in rows:
        theta = f"{r['theta']:.4f}{' (raised)' if r['raised'] else ''}"
        numbers = [f"{r['bits']:.2f}", f"{r['validation_loss']:.4f}"]
        numbers += [f"{r['increase_percent']:+.2f}%", f"{r.get('index_collisions', 0):.0f}"]
        lines.append([str(r["ranks"]), r["run"], theta, *numbers])
    return text_table(header, lines, left=3)


def draw(curves: dict[int, dict[str, list[Any]]], path: Path) -> None:
    """Draw the smoothed training losses, one panel per number of ranks."""
    figure = new_figure(3.7 * len(curves) + 0.4, 3.8)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    styles = {"": "-", "2x": ":", "4x": "--", "10x": "-"}
    for axes, (ranks, runs) in zip(panels, curves.items(), strict=True):
        for name, records in runs.items():
            kind, _, level = name.partition(" ")
            losses = [r[TRAIN_LOSS] for r in records if TRAIN_LOSS in r]
            window = max(1, len(losses) // 20)
            means = [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]
            steps = range(window, len(losses) + 1)
            axes.plot(steps, means, styles[level], color=color_of(kind), lw=1.1, label=name)
        axes.set_title(f"{ranks} ranks")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("training loss (nats per token, running mean)")
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train, compare and draw; return 1 if an exact index is 25% off the dense loss."""
    options = _parse(argv)
    curves: dict[int, dict[str, list[Any]]] = {}
    rows = []
    for ranks in options.ranks:
        runs = cases(options.kinds, options.levels)
        curves[ranks] = {name: train(options, name, ranks, extra) for name, extra in runs.items()}
        dense = row("dense", ranks, curves[ranks]["dense"], 1.0)["validation_loss"]
        rows += [row(name, ranks, records, dense) for name, records in curves[ranks].items()]
    print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    if options.out:
        draw(curves, Path(options.out))
    exact = [r for r in rows if not r["run"].startswith("sum1")]
    return 1 if any(r["increase_percent"] > 25 for r in exact) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_first(
        "config",
        "--config",
        default="train_configs/debug_tagc.toml",
        help="the TOML file of the model",
    )
    parser.add_argument("--steps", type=int, default=300, help="steps per run")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--levels", default=",".join(LEVELS), help=f"some of {', '.join(LEVELS)}")
    parser.add_argument("--work", default="outputs/tagc_loss", help="folder of the runs")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    parser.add_argument("--out", default="outputs/tagc_loss/tagc_loss.png", help="the PNG, or ''")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, steps=10)
    parser.check_toml(options.config, "CONFIG")
    for name, known in (("kinds", KINDS), ("levels", LEVELS)):
        chosen = getattr(options, name).split(",")
        if unknown := [item for item in chosen if item not in known]:
            parser.error(f"--{name}: got {unknown[0]!r}, expected some of {', '.join(known)}")
        setattr(options, name, chosen)
    ranks = options.ranks.split(",")
    if not all(item.isdecimal() and int(item) > 1 for item in ranks):
        parser.error(f"--ranks: got {options.ranks!r}, expected numbers above 1 such as 2,4")
    options.ranks = [int(item) for item in ranks]
    if any(options.batch % item for item in options.ranks):
        parser.error(f"--batch: got {options.batch}, expected a multiple of {options.ranks}")
    return options


if __name__ == "__main__":
    sys.exit(main())
