# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``llama_cola``: CoLA (Liu et al., 2025), a nonlinearity in every bottleneck.

    y = B σ(A x),    σ = SiLU,    A (r, d_in),  B (d_out, r)        (Eq. 3)

`models.linears.low_rank_group` applies it. Where σ acts is a setting, ``low_rank.activation``
(Table 10), read from `LlamaArgs.latent_silu` and `LlamaArgs.outer_silu`.
"""

from typing import Any

from torchtitan_lr.models.families.family import ModelFamily

RANKS = {
    "debug": 32,
    "tiny": 64,
    "60M": 128,
    "130M": 256,
    "350M": 256,
    "1B": 512,
    "1B_boost": 512,
    "3B": 768,
    "7B": 1024,
    "8B": 1024,
    "13B": 1280,
    "30B": 2048,
}
"""Rank r of every linear by size: CoLA's (Table 5) and BOOST's, d/4 but at 130M."""

KEEPS_OUTER_SILU = ("debug", "tiny", "60M", "130M")
"""Sizes at which SwiGLU keeps its own SiLU: it helps up to 130M and no longer at 350M (CoLA,
Appendix on Table 10)."""


class CoLA(ModelFamily):
    """Factors with σ between them: y = B σ(A x). No linear map equals it, so none is exported."""

    name = "cola"

    def defaults(self, size: str) -> dict[str, Any]:
        """σ in every bottleneck, and up to 130M the SiLU on the gate too."""
        rank = RANKS[size]
        activation = "both" if size in KEEPS_OUTER_SILU else "lowrank"
        return {"rank_attention": rank, "rank_ffn": rank, "activation": activation}
