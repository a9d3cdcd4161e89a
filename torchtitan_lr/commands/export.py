# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint as safetensors.

Each export has a model card, and `repeat.toml` with the run's settings.

With this package's factored names, for every model:

    torchtitan-lr export outputs/checkpoint/step-100 exported

For transformers' AutoModelForCausalLM, with the tokenizer and a model card. A model that equals a
full-rank LLaMA (llama_full, llama_svd) becomes one; others bring their code, to be loaded with
trust_remote_code=True:

    torchtitan-lr export outputs/checkpoint/step-100 exported --format hf
"""

import argparse
import sys
from pathlib import Path

from torchtitan_lr.checkpoints.folders import is_free, unfinished
from torchtitan_lr.commands.parser import OneLineParser, add_extension
from torchtitan_lr.errors import ConfigError, escaped

DTYPES = ("checkpoint", "float32", "bfloat16")


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint, the output folder and the options."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a run's folder (its newest step), or .../checkpoint/step-100",
    )
    add_out(parser)
    parser.add_argument(
        "--format", choices=["factored", "hf"], default="factored", help="names of the weights"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint", help="precision written")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: the run's own record")
    add_extension(parser)
    parser.add_argument(
        "--keep_factors", action="store_true", help="hf: keep the factors of llama_svd too"
    )
    parser.add_argument(
        "--license", default="", help="licence for the model card, such as apache-2.0"
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", help="of one file of weights: 5GB, 500MB or bytes"
    )


def add_out(parser: OneLineParser) -> None:
    """Add the output folder: the second argument, or ``--out``."""
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, help="a new or empty folder")
    parser.add_argument("--out", dest="out_option", metavar="OUT", type=Path, help="the same")


def check_out(args: argparse.Namespace) -> None:
    """Set ``args.out`` to the output folder.

    Raises:
        ConfigError: There is none, or two, or it is not empty.
    """
    if (args.out is None) == (args.out_option is None):
        raise ConfigError("OUT", args.out and str(args.out), "one folder to write into")
    args.out = args.out or args.out_option
    if not is_free(args.out):
        raise ConfigError("OUT", str(args.out), "a folder that is empty or new")


def run(args: argparse.Namespace) -> int:
    """Write the export; return the exit status."""
    check_out(args)
    export(args)
    print(escaped(f"{args.checkpoint} ({args.format}) -> {args.out}"))
    return 0


def export(args: argparse.Namespace) -> None:
    """Load, convert, write.

    Args:
        args: the parsed arguments.

    Raises:
        ConfigError: The checkpoint cannot be read, converted or written.
    """
    import torch

    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.hf.card import Exported, write_card
    from torchtitan_lr.hf.export import check_hf_exportable, export_factored
    from torchtitan_lr.hf.folder import add_tokenizer, export_folder, find_tokenizer
    from torchtitan_lr.hf.loading import (
        build_model_args,
        find_step,
        open_weights,
        read_run_config,
    )
    from torchtitan_lr.hf.shards import plan_shards

    import_extension(args.custom_import)
    plan_shards({}, args.max_shard_size)  # refuse a wrong size before anything is written
    args.checkpoint = find_step(args.checkpoint)
    config = read_run_config(args.checkpoint, args.config)
    model_args, size = build_model_args(config), args.max_shard_size
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
        with unfinished(args.out) as aside:
            if hf:
                export_folder(
                    source, config, aside, dtype, size, args.keep_factors, assets, args.license
                )
            else:
                written = export_factored(source, aside, dtype, size)
                if assets:
                    add_tokenizer(config, aside, model_args.max_seq_len)
                exported = Exported(aside, written, "factored", args.license)
                write_card(model_args, config, source.step_dir, exported)
    except OSError as error:
        raise ConfigError("OUT", str(args.out), f"a writable folder ({error})") from error
    if not assets:
        path = config.model.hf_assets_path
        print(escaped(f"no tokenizer in {path}: exported without one"), file=sys.stderr)
