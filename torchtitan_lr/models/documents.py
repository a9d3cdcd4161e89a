# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Several documents in one sequence, each as if it were alone.

A token attends to the earlier tokens of its own document, and positions restart with each document.
Attention gets a mask that is block-diagonal and causal. It is made once per forward pass (and
pipeline stage) from the documents' indices, and used by all blocks.
"""

import torch
from torch import Tensor


def separate(documents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the positions of tokens in their documents, and what attention adds to its scores.

    Args:
        documents: Index of each token's document (b, s). It changes where a document begins, and is
            different for all documents of a row.
        dtype: Of the queries.

    Returns:
        Positions (b, s), int64, from 0. The first token of a row begins a document: what a row
        continues from an earlier one is not there. And a mask (b, 1, s, s): 0 for the tokens up to
        one's own of the same document, else -inf.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    begins = torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)
    positions = places - torch.where(begins, places, 0).cummax(dim=1).values
    same = documents[:, :, None] == documents[:, None, :]
    # For ``scaled_dot_product_attention``, not ``flex_attention``: that has no backward on a CPU
    # (torch 2.13), and without a compiler it stores all scores.
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return positions, mask.masked_fill_(~same.tril_(), float("-inf"))[:, None]
