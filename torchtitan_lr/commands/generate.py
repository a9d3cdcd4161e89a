# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Continue text with the model of a training checkpoint.

One prompt is continued on the terminal as it is generated:

    torchtitan-lr generate outputs/debug_cola --prompt "def main("

A file of prompts, or stdin, gives one line of JSON per prompt:

    torchtitan-lr generate outputs/debug_cola --prompts prompts.txt --out texts.jsonl
    echo "import os" | torchtitan-lr generate outputs/debug_cola --prompts -

A model that was fine-tuned on chats answers on the terminal, by its chat template; Ctrl-D ends:

    torchtitan-lr generate outputs/debug_cola --chat

A run's folder stands for its newest whole step. A prompt and its continuation fit in the window
that the model was trained on, else the command fails.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser, refuse_torchrun
from torchtitan_lr.config.files import parse_json, read_regular
from torchtitan_lr.errors import ConfigError, DataError, escaped


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint and the options."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a run's folder, a step's or an export's",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument(
        "--prompts", type=Path, help="file of prompts: one per line, or .jsonl; - is stdin"
    )
    source.add_argument(
        "--chat", action="store_true", help="answer line after line, as fine-tuned on chats"
    )
    parser.add_argument("--out", type=Path, help="JSONL file to write; default: the terminal")
    parser.add_argument(
        "--max_new_tokens", type=int, help="at most; default: 100, or what the window leaves"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=50, help="0 samples among all tokens")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 samples among all tokens")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a text; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="prompt i samples with seed + i")
    parser.add_argument("--device", default="", help="default: cuda where there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")


def run(args: argparse.Namespace) -> int:
    """Continue the prompts; return the exit status."""
    refuse_torchrun()
    check_args(args)
    prompts = [args.prompt or ""] if args.prompts is None else read_prompts(args.prompts)
    write_texts(args, prompts)
    return 0


def check_args(args: argparse.Namespace) -> None:
    """Raise for invalid values.

    Raises:
        ConfigError: An option has an invalid value; the error names the first one.
    """
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise ConfigError("--max_new_tokens", args.max_new_tokens, "a positive integer")
    if args.temperature != 0 and not 0.01 <= args.temperature < float("inf"):
        raise ConfigError("--temperature", args.temperature, "0 (greedy) or a number from 0.01")
    if not 0 <= args.top_k < 2**63:
        raise ConfigError("--top_k", args.top_k, "0 (all tokens) or an integer up to 2**63 - 1")
    if not 0 < args.top_p <= 1:
        raise ConfigError("--top_p", args.top_p, "a number above 0 and at most 1 (all tokens)")
    if not 0 <= args.seed < 2**63:
        raise ConfigError("--seed", args.seed, "an integer from 0 to 2**63 - 1")
    for key, texts in (("--prompt", [args.prompt or ""]), ("--stop", args.stop)):
        for text in texts:
            _check_text(key, text, text)
    for name in ("out", "json"):
        if args.chat and getattr(args, name):
            raise ConfigError(f"--{name}", str(getattr(args, name)), "no such option with --chat")
    if "" in args.stop:
        raise ConfigError("--stop", "", "a text of at least one character")
    if args.out is not None and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        raise ConfigError("--out", str(args.out), "a file in a folder that exists")
    if args.out and args.prompts and os.path.realpath(args.out) == os.path.realpath(args.prompts):
        raise ConfigError("--out", str(args.out), "another file than --prompts")


def _check_text(key: str, got: str, text: str) -> None:
    """Raise for lone surrogates: JSON can have them, and bytes that are not UTF-8 become some."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        want = f"text in UTF-8 (position {error.start}: {error.reason})"
        raise ConfigError(key, got, want) from error


def read_prompts(source: Path) -> list[str]:
    """Read prompts.

    Args:
        source: A ``.jsonl`` file with the key ``prompt`` in each line, or any other file with one
            prompt per line; ``-`` is stdin, where a line that begins with ``{`` is JSON.

    Raises:
        ConfigError: The file cannot be read or has no prompts.
        DataError: A line is not valid.
    """
    try:
        piped = str(source) == "-"
        text = sys.stdin.read() if piped else read_regular(source).decode("utf-8")
        text = text.removeprefix("\ufeff")  # editors on Windows write it in front
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--prompts", str(source), f"a file in UTF-8 or - ({error})") from error
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if source.suffix == ".jsonl" or (piped and line.startswith("{")):
            try:
                prompt = parse_json(line)["prompt"]
            except (ValueError, KeyError):
                prompt = None
            if not isinstance(prompt, str):
                want = 'a line such as {"prompt": "text"}'
                raise DataError("--prompts", f"{source}:{number}", want)
        else:
            prompt = line.removesuffix("\r")
        _check_text("--prompts", f"{source}:{number}", prompt)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError("--prompts", str(source), "at least one line that is not empty")
    return prompts


def write_texts(args: argparse.Namespace, prompts: list[str]) -> None:
    """Continue the prompts and write the results; all prompts are checked before the first.

    Raises:
        ConfigError: The model cannot be loaded, or a prompt cannot be continued.
    """
    from torchtitan_lr.hf.folders import read_any
    from torchtitan_lr.hf.generation import (
        USUAL_NEW_TOKENS,
        Settings,
        build_generator,
        continue_ids,
        max_new_tokens,
    )
    from torchtitan_lr.models.families import FAMILIES, find_family
    from torchtitan_lr.training.loading import find_device

    device = find_device(args.device)
    try:
        model_args, weights, tokenizer, _ = read_any(args.checkpoint)
    except ConfigError as error:
        if error.key != "model.name" or find_family(str(error.got)):
            raise
        known = ", ".join(family.model_name for family in FAMILIES.values())
        want = f"one of the package's own families: {known}"
        raise ConfigError(error.key, error.got, want) from error
    window = model_args.max_seq_len
    settings = Settings(args.temperature, args.top_k, args.top_p, args.stop)
    if args.chat:
        from torchtitan_lr.commands.chat import converse

        model = build_generator(model_args, weights, device)
        limit = args.max_new_tokens or USUAL_NEW_TOKENS
        converse(model, tokenizer, window, limit, settings, args.seed, _ask, _print)
        return
    rows: list[tuple[str, list[int], int]] = []
    for index, prompt in enumerate(prompts, start=1):
        key = "--prompt" if args.prompts is None else f"--prompts, prompt {index}"
        ids = tokenizer.encode(prompt, add_bos=True, special=True)
        most = max_new_tokens(window, len(ids), key, args.max_new_tokens)
        rows.append((prompt, ids, args.max_new_tokens or min(USUAL_NEW_TOKENS, most)))
    model = build_generator(model_args, weights, device)

    def finish(row: int, write: Any) -> dict[str, Any]:
        prompt, ids, limit = rows[row]
        found = continue_ids(model, tokenizer, ids, limit, settings, args.seed + row, write)
        return {"prompt": prompt} | dataclasses.asdict(found) | {"text": prompt + found.text}

    if args.prompt is not None and not args.json and args.out is None:
        _print(args.prompt)
        finish(0, _print)
        _print("\n")
        return
    to_stdout = contextlib.nullcontext(sys.stdout)
    with to_stdout if args.out is None else args.out.open("w", encoding="utf-8") as file:
        for row in range(len(rows)):
            print(json.dumps(finish(row, lambda piece: None)), file=file, flush=True)


def _ask() -> str | None:
    """Read the next message that is not empty; None at the end of the input (Ctrl-D)."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            _check_text("message", line, line)
            return line


def _print(piece: str) -> None:
    # Also into a pipe, which may lead to a terminal; --json and --out have the exact text.
    print(escaped(piece, keep="\n\t"), end="", flush=True)
