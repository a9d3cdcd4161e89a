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
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.commands import parser as common
from torchtitan_lr.errors import escaped


def add_arguments(parser: common.OneLineParser) -> None:
    """Add the folders and the options."""
    parser.add_argument(
        "folder", metavar="DIR", help="a Hugging Face LLaMA (a folder, OWNER/NAME), or an export"
    )
    common.add_out(parser)
    parser.add_argument("--family", help="full or svd; default: the model's own")
    parser.add_argument("--rank", type=int, help="svd: rank of every factorised linear")
    parser.add_argument(
        "--calibration",
        metavar="PATH",
        help="svd: text (.txt, .jsonl, .parquet) whose activations weigh the errors; or cpython",
    )
    parser.add_argument(
        "--calibration_tokens", type=int, default=65536, help="tokens of it to read at most"
    )
    common.add_text_column(parser)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer; default: DIR")
    precision = "precision written; default: the files', at least float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=precision)
    common.add_device(parser)
    common.add_extension(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; return the exit status."""
    common.check_out(args.out, "OUT")
    common.check_at_least(args, calibration_tokens=1)
    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.hf.import_hf import import_folder

    import_extension(args.custom_import)
    report = (lambda matrix: None) if args.json else print_matrix
    result = import_folder(args, report, lambda text: print(escaped(text), file=sys.stderr))
    print(json.dumps(result, indent=2) if args.json else as_text(result, args.custom_import))
    return 0


def print_matrix(matrix: Any) -> None:
    """Print the error of one factorised matrix, a `hf.svd_import.MatrixReport`."""
    shape = "x".join(map(str, matrix.shape))
    line = f"{matrix.name:<28}{shape:>12}  rank {matrix.rank:<5} error {matrix.error:.4f}"
    if matrix.weighted_error is not None:
        line += f"  weighted {matrix.weighted_error:.4f}"
    print(line, flush=True)


def as_text(result: dict[str, Any], custom_import: str | None) -> str:
    """Format the result of `hf.import_hf.import_folder`, with the command that trains it."""
    lines = {"model": f"{result['model']}, {result['parameters']:,} parameters"}
    for key in ("error", "weighted_error"):
        errors = [row[key] for row in result["matrices"] if row[key] is not None]
        if errors:
            lines["mean " + key.replace("_", " ")] = f"{sum(errors) / len(errors):.4f}"
    lines["checkpoint"] = result["checkpoint"]
    lines["train it"] = f"torchtitan-lr train {result['config']}"
    if custom_import:
        lines["train it"] += f" --experimental.custom_import={custom_import}"
    return "\n".join(f"{name:<21}{escaped(value)}" for name, value in lines.items())
