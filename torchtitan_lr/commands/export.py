# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint as safetensors, with its tokenizer and a model card.

With this package's names, for every model:

    torchtitan-lr export outputs/checkpoint/step-100 exported

For transformers' AutoModelForCausalLM. A model that equals a full-rank LLaMA (llama_full,
llama_svd) becomes one; others bring their code, to be loaded with trust_remote_code=True:

    torchtitan-lr export outputs/checkpoint/step-100 exported --format hf
"""

import argparse
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import unfinished
from torchtitan_lr.commands.parser import OneLineParser, check_out
from torchtitan_lr.errors import ConfigError, escaped, require

DTYPES = ("checkpoint", "float32", "bfloat16")


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint, the output folder and the options."""
    parser.add_shared("checkpoint", "out", "--experimental.custom_import")
    parser.add_argument(
        "--format", choices=["factored", "hf"], default="factored", help="names of the weights"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint", help="precision written")
    kept = "hf: keep the factors of llama_svd too"
    parser.add_argument("--keep_factors", action="store_true", help=kept)
    parser.add_argument("--license", default="", help="of the model card, such as apache-2.0")


def run(args: argparse.Namespace) -> int:
    """Load, convert and write; return the exit status."""
    check_out(args.out, "OUT")
    import torch

    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.hf import export
    from torchtitan_lr.hf.card import Kind, write_card
    from torchtitan_lr.training import loading

    import_extension(args.custom_import)
    step = loading.find_step(args.checkpoint)
    config = loading.read_run_config(step)
    model_args = loading.build_model_args(config)
    for_hf = args.format == "hf"
    want = "--format hf; 'factored' always keeps them"
    require(for_hf or not args.keep_factors, "--keep_factors", args.format, want)
    kind: Kind = "factored"
    if for_hf:
        export.check_hf_exportable(model_args, args.keep_factors)
        kind = "llama" if export.is_hf_llama(model_args, args.keep_factors) else "coded"
    assets = config.model.hf_assets_path
    tokenizer = loading.load_tokenizer(assets, model_args)
    weights = loading.load_weights(step, model_args, assets)
    dtype = None if args.dtype == "checkpoint" else getattr(torch, args.dtype)
    try:
        with unfinished(args.out) as aside:
            if for_hf:
                export.export_hf(model_args, weights, aside, dtype, args.keep_factors)
            else:
                export.export_factored(model_args, weights, aside, dtype)
            _add_tokenizer(tokenizer, aside, model_args.max_seq_len)
            write_card(model_args, config, step, aside, kind, args.license)
    except OSError as error:
        raise ConfigError("OUT", str(args.out), f"a writable folder ({error})") from error
    print(escaped(f"{step} ({args.format}) -> {args.out}"))
    return 0


def _add_tokenizer(tokenizer: Any, out: Path, length: int) -> None:
    """Write a tokenizer into an export; ``config.json`` gets its ids of BOS and EOS."""
    from torchtitan_lr.config.files import read_json
    from torchtitan_lr.hf.export import write_json
    from torchtitan_lr.hf.folders import HF_CONFIG
    from torchtitan_lr.hf.tokenizer import export_tokenizer

    ids = export_tokenizer(tokenizer, Path(tokenizer.tokenizer_path), out, length)
    if (out / HF_CONFIG).is_file():
        # Not the padding's: transformers would leave that row of the embedding out of training.
        known = {name: ids[name] for name in ("bos_token_id", "eos_token_id") if name in ids}
        write_json(out / HF_CONFIG, read_json(out / HF_CONFIG) | known)
