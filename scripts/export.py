#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint as safetensors.

With this package's factored names, for every model:

    python scripts/export.py outputs/checkpoint/step-100 --out exported

As a full-rank Hugging Face LLaMA, if the conversion is exact (llama_full, llama_svd):

    python scripts/export.py outputs/checkpoint/step-100 --out exported --format hf
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser, in_one_line

DTYPES = ("checkpoint", "float32", "bfloat16")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        ``checkpoint``, ``out``, ``format``, ``dtype`` and ``config``.
    """
    parser = OneLineParser(
        description=__doc__, usage="%(prog)s CHECKPOINT --out OUT [--format hf] [...]"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a step's folder: .../checkpoint/step-100",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write into, empty or new; also a second argument"
    )
    parser.add_argument(
        "--format", choices=["factored", "hf"], default="factored", help="names of the weights"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint", help="precision written")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: the run's own record")
    options, rest = parser.parse_known_args(argv)
    if options.out is None and rest and not rest[0].startswith("-"):
        options.out = Path(rest.pop(0))  # the older form of --out
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.out is None:
        parser.error("--out: got nothing, expected a folder to write into")
    return options


def export(args: argparse.Namespace) -> None:
    """Load, convert, write.

    Args:
        args: Result of ``parse_args``.

    Raises:
        ConfigError: The checkpoint cannot be read, converted or written.
    """
    # Imported late: torchtitan takes seconds, and --help and argument errors do not need it.
    import torch

    from torchtitan_lr.tools.export import check_hf_exportable, export_factored, export_hf
    from torchtitan_lr.tools.loading import build_model_args, load_model, read_run_config

    model_args = build_model_args(read_run_config(args.checkpoint, args.config))
    if args.format == "hf":
        check_hf_exportable(model_args)
    model = load_model(args.checkpoint, model_args)
    dtype = None if args.dtype == "checkpoint" else getattr(torch, args.dtype)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (export_hf if args.format == "hf" else export_factored)(model, args.out, dtype)
    except OSError as error:
        raise ConfigError("OUT_DIR", str(args.out), f"a writable folder ({error})") from error


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse_args(argv)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise ConfigError("OUT_DIR", str(args.out), "a folder that is empty or new")
    export(args)
    print(f"{args.checkpoint} ({args.format}) -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
