# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Turn a folder of weights into a checkpoint of step 0, from which a run starts.

The folder holds a Hugging Face LLaMA (1, 2, 3.x, TinyLlama, SmolLM2), or what torchtitan-lr export
wrote. A name on the Hub is downloaded into the cache of Hugging Face first. A LLaMA becomes a
llama_full with the same logits:

    torchtitan-lr import HuggingFaceTB/SmolLM2-135M imported
    torchtitan-lr train imported/train.toml

or a llama_svd, whose factors are each matrix's truncated SVD. A calibration text weighs the errors
by the model's activations:

    torchtitan-lr import TinyLlama-1.1B imported --family svd --rank 512
    torchtitan-lr import DIR OUT --family svd --rank 512 --calibration 'text/*.txt'
"""

import argparse
import json
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, check_at_least, check_out
from torchtitan_lr.console.terminal import named_values


def add_arguments(parser: OneLineParser) -> None:
    """Add the folders and the options."""
    where = "a Hugging Face LLaMA (a folder, OWNER/NAME), or an export"
    parser.add_argument("folder", metavar="DIR", help=where)
    parser.add_shared("out", "--text_column", "--device", "--json")
    parser.add_argument("--family", help="full or svd; default: the model's own")
    parser.add_argument("--rank", type=int, help="svd: rank of every factorised linear")
    text = "svd: text (.txt, .jsonl, .parquet) whose activations weigh the errors; or cpython"
    parser.add_argument("--calibration", metavar="PATH", help=text)
    parser.add_argument("--calibration_tokens", type=int, default=65536, help="of it at most")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; default: DIR")
    precision = "precision written; default: the files', at least float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=precision)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; return the exit status."""
    check_out(args.out, "OUT")
    check_at_least(args, calibration_tokens=1)
    from torchtitan_lr.hf.import_hf import import_folder

    result = import_folder(args)
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    for row in result["matrices"]:
        shape = "x".join(map(str, row["shape"]))
        line = f"{row['name']:<28}{shape:>12}  rank {row['rank']:<5} error {row['error']:.4f}"
        if row["weighted_error"] is not None:
            line += f"  weighted {row['weighted_error']:.4f}"
        print(line)
    told = {"model": f"{result['model']}, {result['parameters']:,} parameters"}
    told["checkpoint"] = result["checkpoint"]
    print(named_values(told | {"train_it": f"torchtitan-lr train {result['config']}"}))
    return 0
