# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Continue text with the model of a training checkpoint.

A prompt is continued on the terminal as it is generated, or with --json in a line of its own, as
each prompt of a file is (--prompts, one per line, or .jsonl with the key prompt):

    torchtitan-lr generate outputs/debug_cola --prompt "def main("

A model that was fine-tuned on chats answers on the terminal, by its chat template, until the window
that it was trained on is full; Ctrl-D ends:

    torchtitan-lr generate outputs/debug_cola --chat
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.config.files import parse_json, read_regular
from torchtitan_lr.errors import ConfigError, DataError, escaped, require


def add_arguments(parser: OneLineParser) -> None:
    """Add the checkpoint and the options."""
    parser.add_shared("checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    text = "text to continue; may be repeated"
    source.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=text)
    source.add_argument("--prompts", type=Path, help="file: one per line, or .jsonl; - is stdin")
    source.add_argument("--chat", action="store_true", help="answer line after line")
    most = "at most; default: 100, or what the window leaves"
    parser.add_argument("--max_new_tokens", type=int, help=most)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top_k", type=int, default=50, help="0 samples among all tokens")
    parser.add_argument("--top_p", type=float, default=1.0, help="1 samples among all tokens")
    stop = "ends a text; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    parser.add_argument("--seed", type=int, default=0, help="prompt i samples with seed + i")
    parser.add_shared("--device", "--experimental.custom_import", "--json")


def run(args: argparse.Namespace) -> int:
    """Continue the prompts, or hold a conversation; return the exit status."""
    fits = args.temperature == 0 or args.temperature >= 0.01  # fp32 has no logits over 1e-38
    require(fits, "--temperature", args.temperature, "0 (greedy) or a number from 0.01")
    require(args.top_k >= 0, "--top_k", args.top_k, "0 (all tokens) or a number of tokens")
    require(0 < args.top_p <= 1, "--top_p", args.top_p, "a number in (0, 1]")
    fits = args.max_new_tokens is None or args.max_new_tokens > 0
    require(fits, "--max_new_tokens", args.max_new_tokens, "a number of tokens")
    prompts = args.prompt if args.prompts is None else read_prompts(args.prompts)
    as_json = args.json or args.prompts is not None
    for prompt in args.prompt:
        _check_text("--prompt", prompt)
    from torchtitan_lr.config.build import import_extension
    from torchtitan_lr.hf import generation
    from torchtitan_lr.hf.exported import read_any
    from torchtitan_lr.training.loading import find_device

    import_extension(args.custom_import)
    device = find_device(args.device)
    model_args, weights, tokenizer, _ = read_any(args.checkpoint)
    window = model_args.max_seq_len
    stops = [*filter(None, args.stop)]
    settings = generation.Settings(args.temperature, args.top_k, args.top_p, stops)
    rows: list[tuple[str, list[int], int]] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_bos=True, special=True)
        most = generation.max_new_tokens(window, len(ids), wanted=args.max_new_tokens)
        limit = args.max_new_tokens or min(generation.USUAL_NEW_TOKENS, most)
        rows.append((prompt, ids, limit))
    model = generation.build_generator(model_args, weights, device)
    if args.chat:
        limit = args.max_new_tokens or generation.USUAL_NEW_TOKENS
        converse(model, tokenizer, window, limit, settings, args.seed)
    write = (lambda piece: None) if as_json else _print
    for number, (prompt, ids, limit) in enumerate(rows):
        write(prompt)
        seed = args.seed + number
        found = generation.continue_ids(model, tokenizer, ids, limit, settings, seed, write)
        row = {"prompt": prompt} | dataclasses.asdict(found) | {"text": prompt + found.text}
        print(json.dumps(row) if as_json else "", flush=True)
    return 0


def read_prompts(source: Path) -> list[str]:
    """Read one prompt per line, of ``.jsonl`` its key ``prompt``.

    The path ``-`` is stdin, where a line that begins with ``{`` is JSON.
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
        is_json = source.suffix == ".jsonl" or (piped and line.startswith("{"))
        try:
            prompt = parse_json(line)["prompt"] if is_json else line.removesuffix("\r")
            prompt.encode()  # JSON can have halves of surrogate pairs
        except (ValueError, KeyError, AttributeError) as error:
            want = 'text in UTF-8, or a line such as {"prompt": "text"}'
            raise DataError("--prompts", f"{source}:{number}", want) from error
        prompts.append(prompt)
    require(prompts, "--prompts", str(source), "at least one line that is not empty")
    return prompts


def _check_text(key: str, text: str) -> None:
    """Refuse bytes of the command line or of a terminal that are not UTF-8."""
    require(text.encode(errors="ignore").decode() == text, key, text, "text in UTF-8")


def converse(
    model: Any,  # result of `hf.generation.build_generator`
    tokenizer: Any,
    window: int,  # length of the sequences that the model was trained on
    limit: int,  # most tokens of an answer
    settings: Any,  # `hf.generation.Settings`
    seed: int,  # of the first answer; the next one has seed + 1
) -> None:
    """Answer message after message, each in view of all before it.

    Tokens are those of training: the tokenizer's chat template, or the plain form where there is
    none. An answer ends with EOS or with what the template writes behind answers. A ConfigError
    says that the chat is longer than the trained window.
    """
    import numpy as np

    from torchtitan_lr.data.pairs import MESSAGES, PairEncoder
    from torchtitan_lr.hf.generation import continue_ids, max_new_tokens

    encoder = PairEncoder(tokenizer)
    # An answer ends at the template's mark, such as ``<|im_end|>``.
    mark = encoder.end_mark()
    ids = tokenizer.encode_text(mark, special=True).ids
    if ids and tokenizer.decode(ids[:1]):
        settings = dataclasses.replace(settings, stops=[*settings.stops, mark])
    elif ids:  # special tokens have no text
        settings = dataclasses.replace(settings, stop_ids=ids[:1])
    messages: list[dict[str, str]] = []
    while (question := _ask()) is not None:
        messages.append({"role": "user", "content": question})
        record = {MESSAGES: [*messages, {"role": "assistant", "content": ""}]}
        tokens = encoder.encode(json.dumps(record), answered=False)
        ids = np.maximum(tokens, ~tokens).tolist()  # complements are no labels
        most = min(limit, max_new_tokens(window, len(ids), "message"))
        answer = continue_ids(model, tokenizer, ids, most, settings, seed, _print)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer.text})
        seed += 1


def _ask() -> str | None:
    """Read the next message that is not empty; None at the end of the input (Ctrl-D)."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            _check_text("message", line)
            return line


def _print(piece: str) -> None:
    # Also into a pipe, which may lead to a terminal; --json has the exact text.
    print(escaped(piece, keep="\n\t"), end="", flush=True)
