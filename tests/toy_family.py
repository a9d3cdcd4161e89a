# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A family from outside the package, by ``experimental.custom_import``: y = B tanh(A x)."""

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import ModelFamily
from torchtitan_lr.training.register import register_model_family


class Tanh(ModelFamily):
    def defaults(self, size, rank):
        return {"rank_attention": rank, "rank_ffn": rank, "activation": "fullrank"}

    def act(self, latents):
        return [torch.tanh(latent) for latent in latents]

    def check(self, args):
        if args.activation != "fullrank":
            want = f"'fullrank' for {self.model_name}, which has tanh in its bottlenecks"
            raise ConfigError("low_rank.activation", args.activation, want)
        super().check(args)


register_model_family(Tanh("tanh"))
