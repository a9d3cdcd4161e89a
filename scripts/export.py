#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint as safetensors.

With this package's factored names, for every model:

    python scripts/export.py outputs/checkpoint/step-100 --out exported

For transformers' AutoModelForCausalLM, with the tokenizer and a model card. A model that equals a
full-rank LLaMA (llama_full, llama_svd) becomes one; others bring their code, to be loaded with
trust_remote_code=True:

    python scripts/export.py outputs/checkpoint/step-100 --out exported --format hf
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.errors import ConfigError

DTYPES = ("checkpoint", "float32", "bfloat16")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        ``checkpoint``, ``out``, ``format``, ``dtype``, ``config``, ``keep_factors`` and
        ``max_shard_size``.
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
    parser.add_argument(
        "--keep_factors", action="store_true", help="hf: keep the factors of llama_svd too"
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", help="of one file of weights: 5GB, 500MB or bytes"
    )
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

    from torchtitan_lr.hf.export import check_hf_exportable, export_factored
    from torchtitan_lr.hf.folder import add_tokenizer, export_folder, find_tokenizer
    from torchtitan_lr.hf.loading import build_model_args, open_weights, read_run_config
    from torchtitan_lr.hf.shards import read_size

    max_bytes = read_size(args.max_shard_size)
    config = read_run_config(args.checkpoint, args.config)
    model_args = build_model_args(config)
    hf = args.format == "hf"
    if args.keep_factors and not hf:
        raise ConfigError(
            "--keep_factors", args.format, "--format hf; 'factored' always keeps them"
        )
    if hf:
        check_hf_exportable(model_args, args.keep_factors)
    assets = find_tokenizer(config, model_args)
    source = open_weights(args.checkpoint, model_args, assets)
    dtype = None if args.dtype == "checkpoint" else getattr(torch, args.dtype)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if hf:
            export_folder(source, config, args.out, dtype, max_bytes, args.keep_factors, assets)
        else:
            export_factored(source, args.out, dtype, max_bytes)
            if assets:
                add_tokenizer(config, args.out, model_args.max_seq_len)
    except OSError as error:
        raise ConfigError("OUT_DIR", str(args.out), f"a writable folder ({error})") from error
    if not assets:
        path = config.model.hf_assets_path
        print(f"no tokenizer in {path}: exported without one", file=sys.stderr)


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
