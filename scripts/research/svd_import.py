# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Factorise a trained llama_full and train it on: plain truncated SVD against whitened (SVD-LLM).

    CONFIG_FILE=train_configs/debug_full.toml ./run_llama_train.sh
    python -m scripts.research.svd_import outputs/debug_full/checkpoint/step-150 --out outputs/svd

exports the checkpoint, imports it as llama_svd for every rank, with and without a calibration text,
evaluates, trains on and evaluates again, and prints a table. The dense model trained on as long is
the last row. Finished runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, check_at_least, check_toml, in_one_line
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.errors import RunFailedError
from torchtitan_lr.scaling.experiments import last_error

HEADER = ("model", "rank", "parameters", "mean error", "over activations")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        The options; overrides of the TOML as ``overrides``.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="of a llama_full")
    parser.add_argument("--out", type=Path, required=True, help="folder for all models and runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64], help="r of the factors")
    parser.add_argument("--steps", type=int, default=100, help="steps of training after it")
    parser.add_argument(
        "--calibration", default="python_stdlib", help="as for torchtitan-lr import"
    )
    parser.add_argument("--documents", type=int, default=0, help="of the evaluation; 0 reads all")
    parser.add_argument(
        "--config", default="train_configs/debug_full.toml", help="TOML of the training after it"
    )
    parser.takes_overrides = True
    options = parser.parse_args(argv)
    check_at_least(options, steps=1, documents=0)
    check_toml(options.config)
    return options


def run(name: str, *arguments: object) -> str:
    """Run a command of torchtitan-lr.

    Args:
        name: Its name.
        *arguments: Its command line.

    Returns:
        What it printed.

    Raises:
        RunFailedError: It failed; the message is its last error.
    """
    command = [sys.executable, "-m", "torchtitan_lr", name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunFailedError(last_error(done.stderr, done.returncode))
    return done.stdout


def perplexity(checkpoint: Path, documents: int) -> float:
    """Evaluate a checkpoint on its held-out text, once.

    Args:
        checkpoint: A step's folder.
        documents: How many to read; 0 for all.
    """
    known = checkpoint.parent.parent / f"evaluated-{checkpoint.name}-{documents}.json"
    if not known.exists():
        run("evaluate", checkpoint, "--documents", documents, "--out", known)
    return float(json.loads(known.read_text())["perplexity"])


def import_model(source: Path, folder: Path, arguments: Sequence[object]) -> dict[str, Any]:
    """Import a model, once.

    Args:
        source: The exported model.
        folder: Where to write.
        arguments: Options of ``import``.

    Returns:
        What it prints with ``--json``.
    """
    known = folder.with_suffix(".json")
    if not known.exists():
        known.write_text(run("import", source, folder, "--json", *arguments))
    result: dict[str, Any] = json.loads(known.read_text())
    return result


def train_on(model: dict[str, Any], folder: Path, options: argparse.Namespace) -> Path:
    """Train an imported model.

    Args:
        model: What `import_model` returned.
        folder: The model's folder; the run is inside.
        options: Result of `parse_args`.

    Returns:
        The last checkpoint.
    """
    from torchtitan_lr.scaling.experiments import start

    dump = folder / "run"
    last = dump / "checkpoint" / f"step-{options.steps}"
    settings = {
        "model.name": model["model"],
        "model.flavor": folder / "model_args.json",
        "model.hf_assets_path": folder / "tokenizer",
        "checkpoint.initial_load_path": model["checkpoint"],
        "checkpoint.interval": options.steps,
        "training.steps": options.steps,
        "lr_scheduler.warmup_steps": options.steps // 10,
        "optimizer.lr": 1e-3,
    }
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    if not last.exists():
        start(options.config, dump, [*arguments, *options.overrides]).finish()
    return last


def rows(options: argparse.Namespace) -> list[list[str]]:
    """Run everything and return the table's rows.

    Args:
        options: Result of `parse_args`.
    """
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    exported = out / "exported"
    if not exported.exists():
        run("export", options.checkpoint, exported, "--format", "hf")
    cases: list[tuple[str, str, list[object]]] = []
    for rank in options.ranks:
        plain: list[object] = ["--family", "svd", "--rank", rank]
        cases.append(("svd, plain", f"plain-{rank}", plain))
        whitened = [*plain, "--calibration", options.calibration]
        cases.append(("svd, whitened", f"whitened-{rank}", whitened))
    table = []
    for name, folder_name, arguments in [*cases, ("full", "dense", [])]:
        folder = out / folder_name
        model = import_model(exported, folder, arguments)
        before = perplexity(Path(model["checkpoint"]), options.documents)
        after = perplexity(train_on(model, folder, options), options.documents)
        line = [name, str(arguments[3]) if arguments else "-", f"{model['parameters']:,}"]
        line += [_mean(model["matrices"], key) for key in ("error", "weighted_error")]
        table.append([*line, f"{before:.1f}", f"{after:.1f}"])
        print(f"{name} {line[1]}: {before:.1f} -> {after:.1f}", file=sys.stderr, flush=True)
    return table


def _mean(matrices: list[dict[str, Any]], key: str) -> str:
    values = [matrix[key] for matrix in matrices if matrix[key] is not None]
    return f"{sum(values) / len(values):.3f}" if values else "-"


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the comparison and print its table; return the exit status."""
    options = parse_args(argv)
    table = rows(options)
    print(markdown_table([*HEADER, "perplexity", f"after {options.steps} steps"], table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
