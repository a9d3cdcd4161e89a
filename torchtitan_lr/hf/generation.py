# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Continue texts by transformers' ``generate``, with the class of an export in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.data.tokenizer import Tokenizer, ids_without_token
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.hf.export import for_transformers, is_hf_llama
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.training.loading import Weights

USUAL_NEW_TOKENS = 100
"""Limit without ``--max_new_tokens``, or what the trained window leaves if that is less."""

SEEDS = 2**63

_CONTEXT = 8
"""Last tokens of the prompt that are decoded again: some decoders drop a leading space."""

_UNKNOWN = "\ufffd"
"""The character that decoders return for bytes that are not (yet) a character."""


@dataclass(frozen=True)
class Settings:
    """How tokens are drawn, and what ends a text beside the tokenizer's own stop tokens."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 samples among all tokens."""
    top_p: float = 1.0
    """1 samples among all tokens."""
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()


@dataclass
class Continuation:
    """What follows a prompt."""

    text: str = ""
    new_tokens: int = 0
    """The stop token included."""
    end: str = "length"
    """``length``, ``stop_token`` or ``stop_string``."""


def build_generator(args: LlamaArgs, weights: Weights, device: str) -> Any:
    """Return transformers' LLaMA or its subclass with these weights, in evaluation mode.

    Raises:
        ConfigError: The family is not one of this package.
    """
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from torchtitan_lr.hf.modeling_torchtitan_lr import TorchtitanLRForCausalLM

    transformers.logging.set_verbosity_error()
    dtype = next(iter(weights.values())).dtype
    values, converted = for_transformers(args, weights, dtype, keep_factors=args.low_rank)
    config = transformers.LlamaConfig.from_dict(values)
    dense = is_hf_llama(args, keep_factors=args.low_rank)
    with torch.device("meta"):
        model: Any = (transformers.LlamaForCausalLM if dense else TorchtitanLRForCausalLM)(config)
    model.load_state_dict(converted, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # no weights, so it would stay on meta
    return model.to(device).eval()


def max_new_tokens(
    window: int, prompt: int, key: str = "--prompt", wanted: int | None = None
) -> int:
    """Return how many tokens can follow a prompt in the trained window, and refuse more.

    The last one is never read, so it may lie outside.

    Args:
        window: Length of the sequences that the model was trained on.
        prompt: Number of tokens of the prompt.
        key: The input to name in errors.
        wanted: The number of tokens to check; None for any.

    Raises:
        ConfigError: The prompt is empty or longer than the window, or too many tokens are wanted.
    """
    if not 0 < prompt <= window:
        want = f"from 1 to {window} tokens (the model was trained on windows of {window})"
        raise ConfigError(key, f"{prompt} tokens", want)
    most = window - prompt + 1
    want = f"from 1 to {most} after a prompt of {prompt} tokens (trained window: {window})"
    require(wanted is None or 0 < wanted <= most, "--max_new_tokens", wanted, want)
    return most


def continue_ids(
    model: Any,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    limit: int,
    settings: Settings,
    seed: int,
    write: Callable[[str], Any] = lambda piece: None,
) -> Continuation:
    """Continue one prompt by at most ``limit`` tokens; ``write`` receives the text in pieces."""
    from transformers import GenerationConfig, StoppingCriteriaList

    torch.manual_seed(seed % SEEDS)
    drawn: dict[str, Any] = {"do_sample": settings.temperature > 0}
    if drawn["do_sample"]:
        drawn |= {"temperature": settings.temperature, "top_k": settings.top_k}
        drawn["top_p"] = settings.top_p
    # Rows of the model that the tokenizer has no token for are never drawn.
    unknown = list(ids_without_token(tokenizer, model.config.vocab_size))
    config = GenerationConfig(max_new_tokens=limit, suppress_tokens=unknown or None, **drawn)
    text = _Text(tokenizer, ids, settings, write)
    prompt = torch.tensor([list(ids)], device=model.device)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([text]),
    )
    text.give(len(text.found.text))
    return text.found


class _Text:
    """Decodes what follows a prompt; a criterion of transformers that ends it at a stop.

    A piece of text is given out as soon as it can no longer change: its last character is complete,
    and it is not the beginning of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        settings: Settings,
        write: Callable[[str], Any],
    ) -> None:
        self.found = Continuation()
        self._decode, self._write = tokenizer.decode, write
        self._prompt, self._context = len(prompt), list(prompt[-_CONTEXT:])
        self._known = len(tokenizer.decode(self._context))
        self._stops = settings.stops
        self._stop_ids = {*tokenizer.stop_ids, *settings.stop_ids}
        self._given = 0  # characters

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Read the tokens so far (1, s) and say whether the text has ended (1,)."""
        if self.found.end == "length":  # tokens behind a stop may still arrive
            self._read(ids[0, self._prompt :].tolist())
        return torch.tensor([self.found.end != "length"], device=ids.device)

    def _read(self, new: list[int]) -> None:
        found = self.found
        found.new_tokens = len(new)
        if new[-1] in self._stop_ids:
            found.end = "stop_token"
            return
        found.text = self._decode(self._context + new)[self._known :]
        places = [place for place in map(found.text.find, self._stops) if place >= 0]
        if places:
            found.end, found.text = "stop_string", found.text[: min(places)]
            return
        if found.text.endswith(_UNKNOWN):  # the last character is not whole
            return
        held = 0
        for stop in self._stops:
            for n in range(1, len(stop)):
                if found.text.endswith(stop[:n]):
                    held = max(held, n)
        self.give(len(found.text) - held)

    def give(self, end: int) -> None:
        """Write the text up to a place."""
        if end > self._given:
            self._write(self.found.text[self._given : end])
            self._given = end
