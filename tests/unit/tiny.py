# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Small models, and the part of a job's configuration that a model reads."""

from types import SimpleNamespace

import torch

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.llama import LlamaModel

__all__ = ["FAMILIES", "build_tiny", "job_config", "tiny_args", "tokens"]


def tiny_args(family, **changes):
    """A model of 3 blocks, width 48, 4 heads, with different ranks in the two groups."""
    low_rank = family != "full"
    values = {
        "family": family,
        "dim": 48,
        "n_layers": 3,
        "n_heads": 4,
        "ffn_dim": 80,
        "vocab_size": 96,
        "max_seq_len": 32,
        "rank_attention": 12 if low_rank else 0,
        "rank_ffn": 20 if low_rank else 0,
        "activation": "both" if family in ("cola", "lax") else "fullrank",
    }
    return LlamaArgs(**{**values, **changes})


def build_tiny(family, dtype=torch.float32, **changes):
    model = LlamaModel(tiny_args(family, **changes))
    model.init_weights()
    return model.to(dtype)


def tokens(args, b=2, s=16, seed=0):
    return torch.randint(args.vocab_size, (b, s), generator=torch.Generator().manual_seed(seed))


def job_config(seq_len=64, seed=0, **low_rank):
    section = {
        "rank": 0,
        "rank_attention": 0,
        "rank_ffn": 0,
        "activation": "flavor",
        "lax_gate": "identity",
    }
    return SimpleNamespace(
        low_rank=SimpleNamespace(**{**section, **low_rank}),
        training=SimpleNamespace(seq_len=seq_len),
        debug=SimpleNamespace(seed=seed),
        caat=SimpleNamespace(lanes=1, sync_fraction=1.0, backward_sum="float32"),
        model=SimpleNamespace(vocab_size=0),
    )


def max_error(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()
