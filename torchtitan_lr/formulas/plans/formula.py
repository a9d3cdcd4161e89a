# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the formulas need to know of a tensor-parallel plan, and rows of its traffic.

The formulas are independent of the plans that run (`parallel.plans`): they state on paper what a
plan should send, so that a measured step can disagree. Both sides are joined by the plan's name.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic


class Kept(NamedTuple):
    """Elements that a block keeps for backward, on one rank."""

    activations: int
    """In the activations' dtype."""
    statistics: int
    """In fp32; fp64 for fp64."""


class PlanFormula:
    """One plan on paper. The defaults hold for a residual stream that every rank has whole.

    Attributes:
        name: The plan's name, ``parallelism.tp_plan``.
        low_rank: Whether the plan is for factorised linears.
        shards_stream: Whether a rank holds d/T features of the residual stream. Its norms then
            exchange a statistic per token.
        shards_latents: Whether a rank holds r/T features of each latent.
        shards_heads: Whether a rank attends with its share of the heads, and not with all of them.
    """

    name: str = ""
    low_rank: bool = True
    shards_stream: bool = False
    shards_latents: bool = False
    shards_heads: bool = True

    def block(
        self, shape: ModelShape, settings: PlanSettings, n: int, ranks: int, column_multiple: int
    ) -> list[Traffic]:
        """Return the collectives of one decoder block, without a learned gate's (T > 1).

        Args:
            shape: Shape and family of the model.
            settings: The plan's settings.
            n: Tokens of the micro-batch.
            ranks: T.
            column_multiple: Padding of a payload with a statistic column; 1 for none.
        """
        raise NotImplementedError

    def embedding(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Return the collectives of the embedding, sharded along d; arguments as of `block`."""
        return [forward("all_gather", [n * shape.dim], scope="embedding")]

    def head(self, shape: ModelShape, settings: PlanSettings, n: int) -> list[Traffic]:
        """Return the collectives of final norm and head, without the gather of logits."""
        return [backward("all_reduce", [n * shape.dim])]

    def factors(self, d_in: int, d_out: int, rank: int, t: int) -> list[tuple[int, ...]]:
        """Shapes of A and B on one of t ranks.

        A rank multiplies with what it stores: these are also the shapes of its products.

        Args:
            d_in: Input width of the linear.
            d_out: Its output width.
            rank: Its rank r.
            t: Tensor-parallel ranks T.
        """
        if self.shards_stream:
            return [(rank, d_in // t), (d_out // t, rank)]
        return [(rank // t, d_in), (d_out, rank // t)]

    def kept(self, shape: ModelShape, settings: PlanSettings | None, n: int, t: int) -> Kept:
        """Return the saved elements of a block (low-rank checkpointing): input nd, latents 7nr.

        Args:
            shape: Shape and family of the model; low-rank.
            settings: The plan's settings; None on a single rank.
            n: Tokens of the micro-batch.
            t: Tensor-parallel ranks T.
        """
        latents = n * latent_width(shape) // (t if self.shards_latents else 1)
        return Kept(n * shape.dim + latents, statistics=0)


def latent_width(shape: ModelShape) -> int:
    """Return the ranks of a block's seven linears together: 7r where all are equal."""
    return 4 * shape.rank_attention + 3 * shape.rank_ffn


def forward(
    op: str, payloads: Sequence[int], role: str = "activation", scope: str = "block"
) -> Traffic:
    """Return the row of one forward collective per payload.

    Args:
        op: As in `Traffic`.
        payloads: Elements of each call.
        role: As in `Traffic`.
        scope: As in `Traffic`.
    """
    return Traffic(scope, "forward", op, role, len(payloads), sum(payloads))


def backward(
    op: str, payloads: Sequence[int], role: str = "activation", scope: str = "block"
) -> Traffic:
    """Return the row of one backward collective per payload; arguments as of `forward`."""
    return Traffic(scope, "backward", op, role, len(payloads), sum(payloads))


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
