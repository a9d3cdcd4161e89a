#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sample text from a training checkpoint.

For example:

    python scripts/generate.py outputs/checkpoint/step-100 --prompt "def main("
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser, in_one_line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line.

    Args:
        argv: The arguments; ``sys.argv[1:]`` by default.

    Returns:
        The options by name.
    """
    parser = OneLineParser(description=__doc__)
    parser.add_first("checkpoint", "--checkpoint", type=Path, help="a step's folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=50, help="0 samples among all tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--device", default="", help="default: cuda where there is one, else cpu")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: the run's own record")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    """Raise for invalid values.

    Args:
        args: Result of ``parse_args``.

    Raises:
        ConfigError: An option has an invalid value; the error names the first one.
    """
    if args.max_new_tokens < 1:
        raise ConfigError("--max_new_tokens", args.max_new_tokens, "a positive integer")
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError("--temperature", args.temperature, "0 (greedy) or a positive number")
    if not 0 <= args.top_k < 2**63:
        raise ConfigError("--top_k", args.top_k, "0 (all tokens) or an integer up to 2**63 - 1")
    if not 0 <= args.seed < 2**63:
        raise ConfigError("--seed", args.seed, "an integer from 0 to 2**63 - 1")
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:  # the command line is not UTF-8
        want = f"text in UTF-8 (position {error.start}: {error.reason})"
        raise ConfigError("--prompt", args.prompt, want) from error


def run(args: argparse.Namespace) -> str:
    """Load the model and its tokenizer, and continue the prompt.

    Args:
        args: Result of ``parse_args``.

    Returns:
        The prompt and its continuation.

    Raises:
        ConfigError: The checkpoint, tokenizer, prompt or device cannot be used.
    """
    # Imported late: torchtitan takes seconds, and --help and argument errors do not need it.
    import torch

    from torchtitan_lr.data.tokenizer import build_tokenizer, check_tokenizer
    from torchtitan_lr.tools.generate import generate
    from torchtitan_lr.tools.loading import build_model_args, load_model, read_run_config

    config = read_run_config(args.checkpoint, args.config)
    model_args = build_model_args(config)
    tokenizer: Any = build_tokenizer(config)
    if check_tokenizer(config) > model_args.vocab_size:
        want = f"a tokenizer within the model's vocabulary of {model_args.vocab_size}"
        raise ConfigError("model.hf_assets_path", config.model.hf_assets_path, want)
    prompt = tokenizer.encode(args.prompt, add_bos=True, add_eos=False)
    if not prompt:
        raise ConfigError("--prompt", args.prompt, "a text of at least one token")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = load_model(args.checkpoint, model_args, config.model.hf_assets_path)
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("--device", device, "a device of this machine, such as cpu") from error
    tokens = generate(
        model,
        torch.tensor([prompt], device=device),
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        args.seed,
        stop_id=tokenizer.eos_id,
    )
    return str(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True))


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parse_args(argv)
    check_args(args)
    text = run(args)
    print(json.dumps({"prompt": args.prompt, "text": text}) if args.json else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
