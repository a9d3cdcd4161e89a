# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The modules that apply a model's weights, and how one device applies them.

These modules have no products of their own: each calls its ``plan``. `OneDevice` is the plan of a
single device; a plan of tensor parallelism (`parallel.plan_parts.Plan`) has the same methods.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.collectives import local
from torchtitan_lr.models.ends import Errors, linear_loss
from torchtitan_lr.models.linears import (
    Gated,
    LowRankLinear,
    activated,
    down_products,
    gated_linear,
    used_width,
)

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs

# The groups of a block, and their linears.
GROUPS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


class OneDevice:
    """Applies the weights of a model on one device; ``norm`` is the one in front of a group."""

    keeps_factors = True  # whether `down` gets SwiGLU's factors, not their product
    keeps_inputs = False  # whether σ(h) and that product are kept for backward too

    def take_over(self, model: nn.Module) -> None:
        """Let all of a model apply its weights by this plan."""
        for module in model.modules():
            if isinstance(module, Planned):
                module.plan = self

    def embed(self, tokens: Tensor, embedding: nn.Embedding) -> Tensor:
        """Look tokens (b, s) up in weight (V, d): (b, s, d)."""
        return F.embedding(tokens, local(embedding.weight))

    def product(
        self, group: "Group", x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None
    ) -> list[Tensor]:
        """Return one output W x (b, s, d_out) per full-rank linear of x (b, s, d_in)."""
        x = x if norm is None else norm(x)
        outputs = []
        for linear in linears:
            width = used_width(linear.weight, group.pads)
            if width == linear.weight.shape[0] and x.shape[-1] == linear.weight.shape[1]:
                outputs.append(linear(x))
            else:
                outputs.append(gated_linear(Gated(x), linear.weight, width))
        return outputs

    def down(
        self,
        group: "Group",
        x: Tensor | Gated,
        linears: Sequence[LowRankLinear],
        norm: nn.Module | None,
    ) -> list[Tensor]:
        """Return one latent A x (b, s, r) per linear of x (b, s, d_in)."""
        # Without gradients nothing is kept, and torch 2.13 does not compile these Functions.
        trains = torch.is_grad_enabled()
        if isinstance(x, Gated):
            if trains:
                keeps = self.keeps_inputs
                return [gated_linear(x, linear.A.weight, keeps=keeps) for linear in linears]
            x = x.product()
        x = x if norm is None else norm(x)
        if trains:
            return down_products(x, [linear.A.weight for linear in linears])
        return [linear.A(x) for linear in linears]

    def mix(
        self, latents: Sequence[Tensor], carried: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """LaX: add g · the previous block's latent to each (b, s, r); without a gate, g = 1."""
        gates = self.gates(linears)
        mixed = []
        for h, previous, g in zip(latents, carried, gates, strict=True):
            mixed.append(h + (previous if g is None else g * previous))
        return mixed

    def gates(self, linears: Sequence[LowRankLinear]) -> list[Tensor | None]:
        """Return the learned gates (1,) of linears, for all of each latent that is here."""
        return [linear.gate for linear in linears]

    def up(
        self, group: "Group", latents: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """Return one output B σ(h) (b, s, d_out) per linear of its latent h (b, s, r)."""
        # The last group of a block keeps σ(h) for backward, not h alone: with σ(h) saved in front
        # of the product, checkpointing does not repeat it.
        if group.name == "down" or not torch.is_grad_enabled():
            active = activated(latents, group.use_silu)
            return [linear.B(h) for h, linear in zip(active, linears, strict=True)]
        outputs = []
        for h, linear, silu in zip(latents, linears, group.use_silu, strict=True):
            weight = linear.B.weight
            width = used_width(weight, group.pads)
            if silu or width != weight.shape[0]:
                keeps = self.keeps_inputs and silu
                outputs.append(gated_linear(Gated(h, None, silu), weight, width, keeps))
            else:
                outputs.append(linear.B(h))
        return outputs

    def whole(self, latents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return latents (b, s, r), replicated, for products outside of `up`."""
        return latents

    def head(
        self, x: Tensor, norm: nn.Module, output: "OutputProjection", targets: Tensor | None
    ) -> Tensor:
        """Return logits (b, s, V) of the stream x (b, s, d), or with targets (b, s) the loss."""
        x = norm(x)
        if targets is not None:
            return linear_loss(x, output.weight, targets, errors=output.errors)
        return self.scores(x, output.weight)

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the scores of a normalized stream."""
        return F.linear(x, weight)


class Planned(nn.Module):
    """A module that applies weights as its plan does."""

    plan = OneDevice()


class Group(Planned):
    """Linears with one input, one of `GROUPS`. The sublayers own them."""

    def __init__(self, args: "LlamaArgs", name: str) -> None:
        super().__init__()
        self.name, self.family = name, args.model_family
        self.opens = name in ("qkv", "gate_up")  # whether it reads the residual stream
        # By linear whether σ is SiLU, or the identity.
        self.use_silu = [args.latent_silu(projection) for projection in GROUPS[name]]
        # Whether the feed-forward's width is padded, see `used_width`; None is on a GPU.
        self.pads = None if name == "gate_up" else False

    def forward(
        self,
        x: Tensor | Gated,
        linears: Sequence[nn.Module],
        norm: nn.Module | None = None,
        carried: Sequence[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs (b, s, d_out) of x (b, s, d_in), and A x (b, s, r) at low rank."""
        # B σ(A x + g · carried) (CoLA, Eq. 3; LaX), where ``carried`` has the latents of the
        # previous block, if any; at full rank W x.
        if not self.family.low_rank:
            return self.plan.product(self, x, linears, norm), []  # type: ignore[arg-type]
        factors: Sequence[LowRankLinear] = linears  # type: ignore[assignment]
        latents = h = self.plan.down(self, x, factors, norm)
        if carried is not None:
            h = self.plan.mix(latents, carried, factors)
        return self.expand(self.family.act(h), factors), latents

    def expand(self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]) -> list[Tensor]:
        """Return B σ(h) per linear."""
        return self.plan.up(self, latents, linears)


# The ends own a plan's module each, not the model: a pipeline split keeps both on one stage, and
# FSDP has gathered the weight when the module is called.
class TokenEmbedding(Planned, nn.Embedding):
    """The embedding of tokens."""

    def forward(self, input: Tensor) -> Tensor:
        """Embed tokens (b, s) as (b, s, d); with lanes at full rank as (b, s, G, d)."""
        return self.plan.embed(input, self)


class OutputProjection(Planned, nn.Linear):
    """The output projection, which applies the final norm too."""

    # Compiled, for a loss in half precision; None computes the same in passes of their own.
    errors: Errors | None = None

    def forward(  # type: ignore[override]
        self, input: Tensor, norm: nn.RMSNorm, targets: Tensor | None = None
    ) -> Tensor:
        """Turn the stream (b, s, d) into logits (b, s, V), or with targets (b, s) into the loss."""
        return self.plan.head(input, norm, self, targets)
