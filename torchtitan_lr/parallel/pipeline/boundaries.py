# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Messages between pipeline stages: their shapes, and their names in the ledger.

A rank sends its part of the residual stream: under bottleneck-aware tensor parallelism, d/T of the
d elements per token. LaX also sends the seven latents that the next block mixes in. Without them
the model's output would depend on the stage split.

Sends and receives run outside the model, where no forward hook or autograd node identifies them.
The stage therefore marks the tensor of each message with an attribute, which the ledger reads.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan_lr.compat.dispatch import tree_leaves
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.plans import PLANS, TPSettings

_MARK = "_pipeline_boundary"


@dataclass(frozen=True)
class Boundary:
    """A rank's message to the next stage for one sequence: ``rows`` rows of ``width`` elements.

    Args:
        rows: s, or s/T if tokens are sharded.
        stream: Elements of the residual stream per row: the rank's share, divided by ``rows``.
        latents: Elements of each latent per row; empty if no latents are sent.
        tokens_per_row: Number of tokens whose stream shards are in a row: T if the latents are
            token-sharded and the stream is feature-sharded, else 1.
        lanes: CAAT-Net: number of streams (b, s, lanes, d) on the rank; 0 if the stream has no such
            dimension.
    """

    rows: int
    stream: int
    latents: tuple[int, ...]
    tokens_per_row: int = 1
    lanes: int = 0

    @property
    def width(self) -> int:
        """Return the elements of a row."""
        return self.stream + sum(self.latents)

    @property
    def elements(self) -> int:
        """Return the elements of a sequence."""
        return self.rows * self.width


def stage_boundary(
    args: LlamaArgs, settings: TPSettings, tp_degree: int, seq_len: int, latents: bool
) -> Boundary:
    """Return the shape of a boundary on one rank.

    ============================  =====  ======  =======================
    plan                          rows   stream  latents (LaX), 7 of
    ============================  =====  ======  =======================
    none (T = 1)                  s      d       r
    none, G lanes at full rank    s      Gd      full rank has none
    caat, G lanes                 s      Gd/T    full rank has none
    btp                           s      d/T     r (replicated)
    btp_caat                      s      d/T     svd and cola have none
    btp, ``comm = "sequence"``    s/T    d       r (token-sharded)
    vanilla, vanilla_replicated   s      d       r/T (feature-sharded)
    megatron                      s      d       full rank has none
    megatron, ``"sequence"``      s/T    d       full rank has none
    ============================  =====  ======  =======================

    Args:
        args: The model's arguments.
        settings: The tensor-parallel plan; ignored at T = 1.
        tp_degree: T.
        seq_len: Tokens s of a sequence.
        latents: Whether there are blocks on both sides, so that LaX's latents are sent.
    """
    widths = [args.rank_attention] * 4 + [args.rank_ffn] * 3
    if not (latents and args.model_family.carries_latents):
        widths = []
    if args.lanes > 1 and not args.low_rank:
        lanes = args.lanes // tp_degree
        return Boundary(seq_len, lanes * args.dim, (), lanes=lanes)
    if tp_degree == 1:
        return Boundary(seq_len, args.dim, tuple(widths))
    plan = PLANS[settings.plan]
    if settings.comm == "sequence":
        shared = tp_degree if plan.shards_stream else 1
        return Boundary(seq_len // tp_degree, args.dim, tuple(widths), shared)
    if plan.shards_latents:
        widths = [width // tp_degree for width in widths]
    stream = args.dim // tp_degree if plan.shards_stream else args.dim
    return Boundary(seq_len, stream, tuple(widths))


def mark(operations: list[Any], boundary: int, pass_: str) -> list[Any]:
    """Mark the tensors of point-to-point operations and return the operations.

    Args:
        operations: ``torch.distributed.P2POp``.
        boundary: Boundary i lies between the stages i and i + 1.
        pass_: ``forward`` or ``backward``.
    """
    for operation in operations:
        setattr(operation.tensor, _MARK, (f"boundary {boundary}", pass_))
    return operations


def boundary_of(arguments: Any) -> tuple[str, str] | None:
    """Return scope and pass of a marked tensor among an operator's arguments, or None."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor) and hasattr(leaf, _MARK):
            found: tuple[str, str] = getattr(leaf, _MARK)
            return found
    return None
