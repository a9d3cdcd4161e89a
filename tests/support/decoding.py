# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One sequence, continued."""

import torch
from torch import Tensor

from torchtitan_lr.inference.decode import Decoder, Sampling
from torchtitan_lr.models.llama import LlamaModel


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

    Args:
        model: The model, on one device.
        tokens: The prompt (1, s), at least one token.
        max_new_tokens: Maximum number of tokens to add.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample among that many most likely tokens; 0 among all.
        seed: Seed of the draws.
        stop_id: A token that ends the text.

    Returns:
        The prompt with its continuation (1, s + n).

    Raises:
        ConfigError: The result would be longer than the window that the model was trained on.
    """
    prompt = tokens[0].tolist()
    stops = () if stop_id is None else (stop_id,)
    sampling = Sampling(temperature, top_k)
    decoder = Decoder(model, [prompt], [max_new_tokens], sampling, [seed], stops)
    while decoder.running[0]:
        prompt += [token for token in decoder.step() if token is not None]
    return torch.tensor([prompt], device=tokens.device)
