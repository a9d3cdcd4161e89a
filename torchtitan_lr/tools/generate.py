# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sample text from a model."""

import torch
from torch import Tensor

from torchtitan_lr.models.llama import LlamaModel


@torch.no_grad()
def generate(
    model: LlamaModel,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_id: int | None = None,
) -> Tensor:
    """Continue one sequence.

    The whole window is run again for every token. Without a cache the cost is quadratic in its
    length, which is enough for inspecting a training run.

    Args:
        model: The model, on one device.
        tokens: The prompt (1, s), at least one token.
        max_new_tokens: Maximum number of tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among that many most likely tokens; 0 among all.
        seed: Seed of the draws.
        stop_id: A token that ends the text.

    Returns:
        The prompt with its continuation (1, s + n). If it is longer than the rotary table, the
        model sees only the last ``max_seq_len`` tokens.
    """
    generator = torch.Generator(tokens.device).manual_seed(seed)
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.model_args.max_seq_len :])
        choice = sample(logits[:, -1], temperature, top_k, generator)
        tokens = torch.cat((tokens, choice), dim=1)
        if choice.item() == stop_id:
            break
    return tokens


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """Draw one token per row.

    Args:
        logits: Scores (b, V).
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among that many most likely tokens; 0 among all.
        generator: Source of randomness.

    Returns:
        Token ids (b, 1).
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
