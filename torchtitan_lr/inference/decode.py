# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Decoding of a batch of prompts: one pass over the prompts, then one token per row and step."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.cache import KeyValueCache
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.llama import LlamaModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    The filters apply in this order: temperature, top-k, top-p.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among that many most likely tokens; 0 among all.
        top_p: Sample among the fewest most likely tokens whose probabilities sum to this or more
            (nucleus sampling, Holtzman et al., 2020); 1 among all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the only tokens that can be drawn.

        Args:
            logits: Scores (b, V).

        Returns:
            Their scores (b, n), in descending order, and ids (b, n). Where every token may be drawn
            and the order is of no use, the logits themselves and None.
        """
        size = logits.shape[-1]
        kept = 1 if self.temperature == 0 else self.top_k
        kept = kept if 0 < kept < size else size
        if kept < size or (self.temperature > 0 and self.top_p < 1):
            return logits.topk(kept)
        return logits, None

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw one token per row by inverting the cumulative distribution.

        A row's draw depends on its own number alone, so that it does not change with the batch.

        Args:
            logits: Scores (b, V).
            uniform: One random number in [0, 1) per row (b,), fp64; not read if greedy.

        Returns:
            Token ids (b,).
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, ids = self.candidates(logits)
        # The sum of a whole vocabulary would round the least likely tokens away in fp32.
        logits = logits.double()
        # The largest logit is subtracted first: a tiny temperature would make all logits infinite.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        sums = probabilities.cumsum(-1)
        total = sums[:, -1:]
        place = torch.searchsorted(sums, uniform[:, None] * total, right=True)
        last = (sums < total).sum(-1, keepdim=True)  # rounding may give a product of 1 · total
        place = place.minimum(last)
        return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


def draws(seed: int, number: int) -> Tensor:
    """Return the random numbers (n,) of one row, fp64 in [0, 1), on the CPU on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(number, generator=generator, dtype=torch.float64)


Choice: TypeAlias = Callable[[Sampling, Tensor, Tensor], Tensor]
"""Draws the next tokens (b,), given the sampling, logits (b, 1, V) and random numbers (b,)."""


def max_new_tokens(
    args: LlamaArgs, prompt: int, key: str = "--prompt", wanted: int | None = None
) -> int:
    """Return how many tokens can follow a prompt, and refuse more.

    Args:
        args: The model's arguments; ``max_seq_len`` is the length it was trained on.
        prompt: Number of tokens of the prompt.
        key: The input to name in errors.
        wanted: The number of tokens to check; None for any.

    Returns:
        The number of tokens, at least 1. The last one is never read, so it may lie outside.

    Raises:
        ConfigError: The prompt is empty or longer than the window, or too many tokens are wanted.
    """
    window = args.max_seq_len
    if not 0 < prompt <= window:
        want = f"from 1 to {window} tokens (the model was trained on windows of {window})"
        raise ConfigError(key, f"{prompt} tokens", want)
    most = window - prompt + 1
    if wanted is not None and not 0 < wanted <= most:
        want = f"from 1 to {most} after a prompt of {prompt} tokens (trained window: {window})"
        raise ConfigError("--max_new_tokens", wanted, want)
    return most


class Decoder:
    """Continues a batch of prompts.

    The first step reads all prompts, each further step one token per row. All rows are computed
    until the last one ends.

    Args:
        model: The model, whole on one device or a rank's part of it.
        prompts: Token ids of each row, at least one per row; the same on all ranks.
        limits: Maximum number of new tokens of each row.
        sampling: How tokens are drawn.
        seeds: Seed of each row's draws.
        stop_ids: Tokens that end a row.
        compiled: Whether the model went through `compile_blocks`. The prompts are read without
            compilation: every length would be compiled anew.
        choice: Draws from the model's logits, if ranks hold parts of them.
        unknown: Tokens that are never drawn: rows of the model that the tokenizer has no token for.

    Attributes:
        cache: The cache.
        running: Whether each row goes on; a caller ends a row after a stop string.
        new_tokens: Number of new tokens of each row, the stop token included.

    Raises:
        ConfigError: A row does not fit its window.
    """

    def __init__(
        self,
        model: LlamaModel,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        stop_ids: Collection[int] = (),
        compiled: bool = False,
        choice: Choice | None = None,
        unknown: Sequence[int] = (),
    ) -> None:
        args = model.model_args
        lengths = [len(prompt) for prompt in prompts]
        for length, limit in zip(lengths, limits, strict=True):
            max_new_tokens(args, length, wanted=limit)
        self._model, self._sampling, self._limits = model, sampling, limits
        self._stop_ids = frozenset(stop_ids)
        device = model.freqs_cis.device
        width, most = max(lengths), max(limits)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        self._next = torch.tensor(padded, device=device)
        self._draws = torch.zeros(len(prompts), 0)
        if sampling.temperature > 0:
            self._draws = torch.stack([draws(seed, most) for seed in seeds]).to(device)
        # The last new token is not read.
        columns = width + most - 1
        self.cache = KeyValueCache(lengths, columns, args.n_layers, device, compiled)
        self._compiled, self._choice = compiled, choice
        self._unknown = torch.tensor(unknown, dtype=torch.int64, device=device)
        self._ruled_out: Tensor | None = None  # the columns of a rank's logits that these are
        self.running = [True] * len(prompts)
        self.new_tokens = [0] * len(prompts)
        self._steps = 0

    @torch.inference_mode()
    def step(self) -> list[int | None]:
        """Compute the next token of every row.

        Returns:
            One token per row; None for a row that had ended before.
        """
        eager = self._compiled and self._steps == 0
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            logits = self._model(self._next, cache=self.cache)
        if len(self._unknown) > 0:
            self._rule_out_unknown(logits)
        uniform = self._draws[:, self._steps] if self._draws.shape[1] else self._draws
        if self._choice is None:
            chosen = self._sampling.choose(logits[:, -1], uniform)
        else:
            chosen = self._choice(self._sampling, logits, uniform)
        self._next = chosen[:, None]
        self._steps += 1
        tokens: list[int | None] = chosen.tolist()
        for row, token in enumerate(tokens):
            if not self.running[row]:
                tokens[row] = None
                continue
            self.new_tokens[row] += 1
            ends = token in self._stop_ids or self.new_tokens[row] >= self._limits[row]
            self.running[row] = not ends
        return tokens

    def _rule_out_unknown(self, logits: Tensor) -> None:
        """Set the scores of `unknown` tokens to -inf, in logits (b, 1, V) or a rank's part."""
        own, first = logits, 0  # the scores here, and the token of the first one
        if isinstance(logits, DTensor):
            own = logits.to_local()
            first = logits.device_mesh.get_local_rank() * own.shape[-1]
        if self._ruled_out is None:  # once, since the host waits for it
            columns = self._unknown - first
            self._ruled_out = columns[(columns >= 0) & (columns < own.shape[-1])]
        own.index_fill_(-1, self._ruled_out, -torch.inf)


def compile_blocks(model: LlamaModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let the blocks, and the head of one process, be compiled for the steps of a `Decoder`.

    The model is changed in place; its weights are not.
    """
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    output = model.output
    if output is not None and not isinstance(output.weight, DTensor):  # a rank's logits are one
        output.compile(backend=backend, fullgraph=True)
