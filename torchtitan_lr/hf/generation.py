# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Continue texts by transformers' ``generate``, with the class of an export in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.data.tokenizer import Tokenizer, ids_without_token
from torchtitan_lr.errors import require
from torchtitan_lr.hf.export import CODED, for_transformers
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.training.loading import Weights

# Limit without ``--max_new_tokens``, or what the trained window leaves if that is less.
USUAL_NEW_TOKENS = 100

_CONTEXT = 8  # last tokens of the prompt, decoded again: some decoders drop a leading space
_UNKNOWN = "\ufffd"  # what decoders return for bytes that are not (yet) a character


@dataclass(frozen=True)
class Settings:
    """How tokens are drawn, and what ends a text beside the tokenizer's own stop tokens."""

    temperature: float = 0.0  # 0 takes the most likely token
    top_k: int = 0  # 0 samples among all tokens
    top_p: float = 1.0  # 1 samples among all tokens
    stops: Sequence[str] = ()
    stop_ids: Sequence[int] = ()


@dataclass
class Continuation:
    """What follows a prompt."""

    text: str = ""
    new_tokens: int = 0  # the stop token included
    end: str = "length"  # or ``stop_token``, ``stop_string``


def build_generator(args: LlamaArgs, weights: Weights, device: str) -> Any:
    """Return transformers' LLaMA or its subclass with these weights, in evaluation mode.

    A ConfigError says that the family is not one of this package.
    """
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from torchtitan_lr.hf.modeling_torchtitan_lr import TorchtitanLRForCausalLM

    transformers.logging.set_verbosity_error()
    dtype = next(iter(weights.values())).dtype
    values, converted = for_transformers(args, weights, dtype, keep_factors=args.low_rank)
    config = transformers.LlamaConfig.from_dict(values)
    kind: Any = TorchtitanLRForCausalLM if CODED in values else transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = kind(config)
    model.load_state_dict(converted, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # no weights, so it would stay on meta
    return model.to(device).eval()


def max_new_tokens(
    window: int, prompt: int, key: str = "--prompt", wanted: int | None = None
) -> int:
    """Return how many tokens can follow a prompt of so many in the trained window.

    A ConfigError, for the key, says that there are none or fewer than wanted.
    """
    want = f"from 1 to {window} tokens (the model was trained on windows of {window})"
    require(0 < prompt <= window, key, f"{prompt} tokens", want)
    most = window - prompt + 1  # the last one is never read, so it may lie outside
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

    torch.manual_seed(seed % 2**63)
    drawn: dict[str, Any] = {"do_sample": settings.temperature > 0}
    if drawn["do_sample"]:
        drawn |= {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
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
        self._decode, self._write, self._stops = tokenizer.decode, write, settings.stops
        self._prompt, self._context = len(prompt), list(prompt[-_CONTEXT:])
        self._known = len(tokenizer.decode(self._context))
        self._stop_ids = {*tokenizer.stop_ids, *settings.stop_ids}
        self._given = 0  # characters

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Read the tokens so far (1, s) and say whether the text has ended (1,)."""
        found = self.found
        if found.end == "length":  # tokens behind a stop may still arrive
            new = ids[0, self._prompt :].tolist()
            found.new_tokens = len(new)
            if new[-1] in self._stop_ids:
                found.end = "stop_token"
            else:
                found.text = self._decode(self._context + new)[self._known :]
                self._look_for_stops()
        return torch.tensor([found.end != "length"], device=ids.device)

    def _look_for_stops(self) -> None:
        text = self.found.text
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.found.end, self.found.text = "stop_string", text[: min(places)]
        elif not text.endswith(_UNKNOWN):  # else the last character is not whole
            held = 0
            for stop in self._stops:
                for n in range(1, len(stop)):
                    if text.endswith(stop[:n]):
                        held = max(held, n)
            self.give(len(text) - held)

    def give(self, end: int) -> None:
        """Write the text up to a place."""
        if end > self._given:
            self._write(self.found.text[self._given : end])
            self._given = end
