# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Bytes that low-rank activation checkpointing saves, in closed form."""

from dataclasses import dataclass

from torchtitan_lr.formulas.parameters import ModelShape
from torchtitan_lr.formulas.plans.formula import PlanFormula
from torchtitan_lr.formulas.plans.registry import UNSPLIT, formula_of
from torchtitan_lr.formulas.traffic import PlanSettings


@dataclass(frozen=True)
class Split:
    """Tensor-parallel split of a block.

    Args:
        degree: Tensor-parallel ranks T.
        settings: The plan; required if T > 1.
    """

    degree: int = 1
    settings: PlanSettings | None = None

    @property
    def formula(self) -> PlanFormula:
        """The plan's formula."""
        return UNSPLIT if self.settings is None else formula_of(self.settings, self.degree)


def kept_bytes(
    shape: ModelShape,
    tokens: int,
    n_heads: int,
    element_size: int,
    save_attention: bool = False,
    split: Split = Split(),
) -> int:
    """Return the bytes that one block saves for backward under low-rank checkpointing, per rank.

    The block's input and the seven latents: nd + 7nr elements (the residual in the middle of the
    block, the second nd of CoLA's Table 4, is made again from the o latent). `PlanFormula.kept`
    says what these are on one of T ranks.

    Args:
        shape: Shape and family of the model; low-rank.
        tokens: Tokens n of the micro-batch.
        n_heads: Query heads.
        element_size: Bytes per activation element.
        save_attention: Whether attention's output (nd/T elements) and the log-sum-exp of every head
            and token are saved. T is 1 here if every rank computes all heads.
        split: Tensor parallelism.
    """
    formula, t = split.formula, split.degree
    statistic_size = max(4, element_size)
    kept = formula.kept(shape, split.settings, tokens, t)
    size = kept.activations * element_size + kept.statistics * statistic_size
    if save_attention:
        shards = t if formula.shards_heads else 1
        size += tokens * shape.dim // shards * element_size
        size += tokens * n_heads // shards * statistic_size
    return size
