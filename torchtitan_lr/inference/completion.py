# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Continue texts with a model: in batches, results in the prompts' order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torchtitan_lr.data.tokenizer import ids_without_token
from torchtitan_lr.inference.decode import Choice, Decoder, Sampling, max_new_tokens
from torchtitan_lr.inference.text import TextStream
from torchtitan_lr.models.llama import LlamaModel

USUAL_NEW_TOKENS = 100
"""Limit without ``--max_new_tokens``, or what the trained window leaves if that is less."""

SEEDS = 2**63


@dataclass(frozen=True)
class Settings:
    """How texts are continued.

    Attributes:
        max_new_tokens: Maximum number of new tokens; None for `USUAL_NEW_TOKENS`.
        sampling: How tokens are drawn.
        seed: Seed of the first prompt; prompt i has seed + i.
        stops: Strings that end a text.
        stop_ids: Tokens that end a text, beside the tokenizer's own.
        batch_size: Prompts that are decoded together.
        compiled: Whether the model went through `inference.decode.compile_blocks`.
        choice: Draws from the model's logits, see `inference.decode.Decoder`.
    """

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    batch_size: int = 16
    compiled: bool = False
    choice: Choice | None = None


@dataclass
class Completion:
    """One continued text.

    Attributes:
        prompt: The prompt.
        text: The prompt and its continuation.
        new_tokens: Number of tokens that were generated, the stop token included.
        end: ``length``, ``stop_token`` or ``stop_string``.
    """

    prompt: str
    text: str
    new_tokens: int = 0
    end: str = "length"


def complete(
    model: LlamaModel,
    tokenizer: Any,
    prompts: Sequence[str],
    settings: Settings,
    write: Callable[[str], Any] | None = None,
) -> Iterator[Completion]:
    """Continue prompts in batches, with the whole model or a rank's part of it.

    ``write`` receives the pieces of the continuation; for one prompt only.

    Returns:
        An iterator over the completions, in the order of the prompts. All prompts are checked
        before the first one is continued.

    Raises:
        ConfigError: A prompt has no tokens or does not fit the trained window.
    """
    rows: list[tuple[str, list[int], int, int]] = []  # prompt, ids, limit, seed
    for index, prompt in enumerate(prompts):
        key = "--prompt" if len(prompts) == 1 else f"--prompts, prompt {index + 1}"
        ids = tokenizer.encode(prompt, add_bos=True, special=True)
        limit = settings.max_new_tokens
        most = max_new_tokens(model.model_args, len(ids), key, limit)
        limit = min(USUAL_NEW_TOKENS, most) if limit is None else limit
        rows.append((prompt, ids, limit, (settings.seed + index) % SEEDS))
    size = settings.batch_size
    batches = (rows[start : start + size] for start in range(0, len(rows), size))
    return chain.from_iterable(
        complete_batch(model, tokenizer, batch, settings, write) for batch in batches
    )


def complete_batch(
    model: LlamaModel,
    tokenizer: Any,
    rows: list[tuple[str, list[int], int, int]],
    settings: Settings,
    write: Callable[[str], Any] | None = None,
) -> list[Completion]:
    """Continue rows ``(prompt, ids, limit, seed)`` together; ``write`` as for `complete`."""
    prompts, ids, limits, seeds = zip(*rows, strict=True)
    stop_ids = {*tokenizer.stop_ids, *settings.stop_ids}
    decoder = Decoder(
        model,
        ids,
        limits,
        settings.sampling,
        seeds,
        stop_ids,
        settings.compiled,
        settings.choice,
        ids_without_token(tokenizer, model.model_args.vocab_size),
    )
    streams = [TextStream(tokenizer, row, settings.stops) for row in ids]
    done = [Completion(prompt, prompt) for prompt in prompts]

    while any(decoder.running):
        for index, token in enumerate(decoder.step()):
            if token is None:
                continue
            piece = ""
            if token in stop_ids:
                done[index].end = "stop_token"
            else:
                piece = streams[index].push(token)
            if not decoder.running[index]:
                piece += streams[index].push(None)
            if streams[index].stopped:
                done[index].end = "stop_string"
                decoder.running[index] = False
            done[index].text += piece
            if write is not None and piece:
                write(piece)
    for completion, count in zip(done, decoder.new_tokens, strict=True):
        completion.new_tokens = count
    return done
