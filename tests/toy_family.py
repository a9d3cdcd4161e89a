# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A model family from outside the package: ``llama_tanh``, y = B (g · tanh(t · A x)).

The temperatures t, one for every latent, and the gain g are parameters of the family's own. A run
names this module by ``experimental.custom_import``.
"""

import torch
from torch import nn

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import RANKS, ModelFamily, OwnParameter
from torchtitan_lr.training.register import register_model_family


class TanhEdge(nn.Module):
    """g · tanh(t · h) of every latent h (b, s, r): each plan's shards of it will do."""

    def forward(self, latents, carried, linears):
        pairs = zip(latents, linears, strict=True)
        return [linear.gain * torch.tanh(h * linear.temperature) for h, linear in pairs]


def near_one(weight, generator):
    weight.normal_(1.0, 0.1, generator=generator)


class Tanh(ModelFamily):
    def defaults(self, size):
        return {"rank_attention": RANKS[size], "rank_ffn": RANKS[size], "activation": "fullrank"}

    def own_parameters(self, args, rank):
        temperature = OwnParameter((rank,), near_one, rank_dim=0)
        return {"temperature": temperature, "gain": OwnParameter((1,), near_one)}

    def build_mix(self):
        return TanhEdge()

    def check(self, args):
        if args.activation != "fullrank":
            want = f"'fullrank' for {self.model_name}, which has tanh in its bottlenecks"
            raise ConfigError("low_rank.activation", args.activation, want)
        super().check(args)


register_model_family(Tanh("tanh"))
