#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint as safetensors.

With our own, factored names, for every model::

    python scripts/export.py outputs/checkpoint/step-100 exported

As a full-rank Hugging Face LLaMA, where that is exact (llama_full, llama_svd)::

    python scripts/export.py outputs/checkpoint/step-100 exported --format hf
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser

DTYPES = ("checkpoint", "float32", "bfloat16")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        ``checkpoint``, ``out_dir``, ``format``, ``dtype`` and ``config``.
    """
    parser = OneLineParser(description="Write a training checkpoint as safetensors.")
    parser.add_argument("checkpoint", type=Path, help="a step's folder: .../checkpoint/step-100")
    parser.add_argument("out_dir", type=Path, help="folder to write into, empty or new")
    parser.add_argument("--format", choices=["factored", "hf"], default="factored")
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint", help="precision written")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: the run's own record")
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> None:
    """Load, convert, write.

    Args:
        args: What ``parse_args`` returned.

    Raises:
        ConfigError: For anything that cannot be read, converted or written.
    """
    # Late, because torchtitan takes seconds to import: --help and a wrong argument do not wait.
    import torch

    from torchtitan_lr.tools.export import check_hf_exportable, export_factored, export_hf
    from torchtitan_lr.tools.loading import build_model_args, load_model, read_run_config

    model_args = build_model_args(read_run_config(args.checkpoint, args.config))
    if args.format == "hf":
        check_hf_exportable(model_args)
    model = load_model(args.checkpoint, model_args)
    dtype = None if args.dtype == "checkpoint" else getattr(torch, args.dtype)
    try:
        args.out_dir.mkdir(parents=True, exist_ok=True)
        (export_hf if args.format == "hf" else export_factored)(model, args.out_dir, dtype)
    except OSError as error:
        raise ConfigError("OUT_DIR", str(args.out_dir), f"a writable folder ({error})") from error


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit status: 0, or 2 with one line on stderr.
    """
    args = parse_args(argv)
    try:
        if args.out_dir.is_dir() and any(args.out_dir.iterdir()):
            raise ConfigError("OUT_DIR", str(args.out_dir), "a folder that is empty or new")
        export(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.checkpoint} ({args.format}) -> {args.out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
