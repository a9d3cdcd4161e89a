# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write a training checkpoint for transformers, with its tokenizer and a model card.

    torchtitan-lr export outputs/checkpoint/step-100 exported

A model that equals a full-rank LLaMA (llama_full, llama_svd) becomes one. Others bring their code:
AutoModelForCausalLM loads them with trust_remote_code=True.
"""

import argparse
from pathlib import Path

from torchtitan_lr.checkpoints.folders import unfinished
from torchtitan_lr.commands.parser import OneLineParser, check_out
from torchtitan_lr.errors import ConfigError, escaped

DTYPES = ("checkpoint", "float32", "bfloat16")


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint, the output folder and the options."""
    parser.add_shared("checkpoint", "out", "--experimental.custom_import")
    parser.add_argument("--format", choices=["hf"], default="hf", help="Hugging Face's")
    parser.add_argument("--dtype", choices=DTYPES, default="checkpoint", help="precision written")
    kept = "keep the factors of llama_svd too"
    parser.add_argument("--keep_factors", action="store_true", help=kept)
    parser.add_argument("--license", default="", help="of the model card, such as apache-2.0")


def run(args: argparse.Namespace) -> int:
    """Load, convert and write; return the exit status."""
    check_out(args.out, "OUT")
    import torch

    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.config.files import read_json
    from torchtitan_lr.hf import export
    from torchtitan_lr.hf.export_tokenizer import export_tokenizer
    from torchtitan_lr.training import loading

    import_extension(args.custom_import)
    step = loading.find_step(args.checkpoint)
    config = loading.read_run_config(step)
    model_args, keep = loading.build_model_args(config), args.keep_factors
    export.check_hf_exportable(model_args, keep)
    coded, assets = not export.is_hf_llama(model_args, keep), config.model.hf_assets_path
    tokenizer = loading.load_tokenizer(assets, model_args)
    weights = loading.load_weights(step, model_args, assets)
    dtype = None if args.dtype == "checkpoint" else getattr(torch, args.dtype)
    try:
        with unfinished(args.out) as aside:
            export.export_hf(model_args, weights, aside, dtype, keep)
            folder, length = Path(tokenizer.tokenizer_path), model_args.max_seq_len
            ids = export_tokenizer(tokenizer, folder, aside, length)
            # Not the padding's: transformers would leave that row of the embedding out of training.
            known = {name: ids[name] for name in ("bos_token_id", "eos_token_id") if name in ids}
            values = read_json(aside / export.HF_CONFIG) | known
            export.write_json(aside / export.HF_CONFIG, values)
            export.write_card(model_args, config, step, aside, coded, args.license)
    except OSError as error:
        raise ConfigError("OUT", str(args.out), f"a writable folder ({error})") from error
    print(escaped(f"{step} -> {args.out}"))
    return 0
