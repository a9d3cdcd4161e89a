# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What crosses the boundaries between pipeline stages, in closed form.

BOOST counts d elements a token for a boundary; under bottleneck-aware tensor parallelism a rank
holds, and therefore sends, its d/T of the residual stream. LaX also sends the seven latents that
the next block mixes in: to drop them would make the model depend on where it is cut.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.registry import FORMULAS
from torchtitan_lr.formulas.traffic import PlanSettings, Traffic


@dataclass(frozen=True)
class Boundary:
    """What a rank sends to the next stage for one sequence: ``rows`` rows of ``width`` elements.

    Args:
        rows: s, or s/T where the ranks share the tokens.
        stream: Elements of the residual stream in a row: its share of a rank, divided by ``rows``.
        latents: Elements of each carried latent in a row; empty where none cross.
        tokens_per_row: How many tokens' shards of the stream lie in a row: T where the latents
            share the tokens and the stream its features, else 1.
        lanes: CAAT-Net: how many streams (b, s, lanes, d) there are on the rank; 0 where the stream
            has no such dimension.
    """

    rows: int
    stream: int
    latents: tuple[int, ...]
    tokens_per_row: int = 1
    lanes: int = 0

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.stream + sum(self.latents)

    @property
    def elements(self) -> int:
        """Elements of a sequence."""
        return self.rows * self.width


def stage_boundary(
    shape: ModelShape, settings: PlanSettings, tp_degree: int, seq_len: int, latents: bool
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
        shape: Shape and family of the model.
        settings: The tensor-parallel plan; of no effect at T = 1.
        tp_degree: T.
        seq_len: Tokens s of a sequence.
        latents: Whether a block sends to another one here, so that LaX's latents cross.
    """
    widths = [shape.rank_attention] * 4 + [shape.rank_ffn] * 3
    if not latents or shape.family != "lax":
        widths = []
    if shape.lanes > 1 and shape.family == "full":
        lanes = shape.lanes // tp_degree
        return Boundary(seq_len, lanes * shape.dim, (), lanes=lanes)
    if tp_degree == 1:
        return Boundary(seq_len, shape.dim, tuple(widths))
    formula = FORMULAS[settings.plan]
    if settings.comm == "sequence":
        shared = tp_degree if formula.shards_stream else 1
        return Boundary(seq_len // tp_degree, shape.dim, tuple(widths), shared)
    if formula.shards_stream:
        return Boundary(seq_len, shape.dim // tp_degree, tuple(widths))
    return Boundary(
        seq_len,
        shape.dim,
        tuple(width // (tp_degree if formula.shards_latents else 1) for width in widths),
    )


def pipeline_traffic(
    boundaries: Sequence[Boundary], local_stages: Collection[int], batch: int, microbatches: int
) -> list[Traffic]:
    """Messages of one rank in one pass of a schedule: one a boundary, micro-batch and direction.

    Args:
        boundaries: Boundary i lies between the stages i and i + 1.
        local_stages: The rank's stages. Two neighbours on one rank (the turn of a V-shaped
            schedule) exchange nothing.
        batch: Sequences of a micro-batch.
        microbatches: Micro-batches of the pass.

    Returns:
        Rows with the scope ``boundary i`` on the mesh dimension ``pp``.
    """
    rows = []
    for index, boundary in enumerate(boundaries):
        sends = index in local_stages
        if sends == (index + 1 in local_stages):
            continue
        elements = microbatches * batch * boundary.elements
        there, back = ("send", "recv") if sends else ("recv", "send")
        scope = f"boundary {index}"
        rows += [
            Traffic(scope, "forward", there, "activation", microbatches, elements, "pp"),
            Traffic(scope, "backward", back, "activation", microbatches, elements, "pp"),
        ]
    return rows
