# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Generation over tensor-parallel ranks: the plans of training, and one choice for all ranks.

A cache takes its shapes from the keys and values that it gets: each rank stores those of its own
heads. The ranks exchange their best candidates only, and draw from the same numbers with the same
seed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.collectives import FEATURES, Ranks, all_gather, local
from torchtitan_lr.inference.decode import Sampling
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.plan_parts import TPSettings
from torchtitan_lr.parallel.plans import resolve_settings


def generation_settings(section: Any, args: LlamaArgs, degree: int) -> TPSettings:
    """Resolve the tensor-parallel settings of a model that generates."""
    settings = resolve_settings(TPSettings.read(section), args, degree)
    # Ranks cannot share one token.
    return replace(settings, comm="all_reduce")


def sharded_choice(ranks: Ranks, sampling: Sampling, logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token (b,) per row, the same on every rank; given the ranks, a `decode.Choice`."""
    # The logits (b, 1, V) are a DTensor with Shard(-1), the random numbers (b,) equal on all ranks.
    # The exchange per row is a score and an id of each candidate, T of them for greedy tokens and k
    # · T for top-k. Without top-k, whole rows of logits are gathered.
    own = local(logits)[:, -1]  # (b, V/T)
    scores, ids = sampling.candidates(own)
    if ids is None:
        return sampling.choose(all_gather([scores], ranks, FEATURES)[0], uniform)
    ids = ids + ranks.rank * own.shape[-1]
    # fp64 holds every score and every id exactly: one message instead of two.
    message = torch.stack((scores.double(), ids.double()), dim=1)
    scores, found = all_gather([message], ranks, FEATURES)[0].unbind(1)
    place = sampling.choose(scores, uniform)
    return found.gather(-1, place[:, None]).squeeze(-1).long()
