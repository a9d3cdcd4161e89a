# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a model family is: the form of its linears, its default settings, and what it refuses.

    full    y = W x                                  LLaMA as it is, the baseline
    svd     y = B A x                                plain factorisation (Kamalakara et al., 2022)
    cola    y = B σ(A x),  σ = SiLU                  CoLA (Liu et al., 2025), Eq. 3
    lax     y_i = B_i σ(A_i x_i + g · A_j x_j)       LaX (Zhang et al., 2025), block j = i - 1

A is (r, d_in), B is (d_out, r). Where σ acts is a setting, ``low_rank.activation`` (CoLA, Table
10). svd's product is a matrix, so that a trained model merges into a full-rank LLaMA; the way back
is not unique. No linear map equals cola or lax. Nothing here depends on ranks or on training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchtitan_lr.config.schema import LowRank
from torchtitan_lr.errors import require
from torchtitan_lr.models.linears import LowRankLinear

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs

_PREFIX = "llama_"

# SwiGLU's own SiLU helps up to 130M and no longer at 350M (CoLA, Appendix on Table 10).
KEEPS_OUTER_SILU = ("debug", "tiny", "60M", "130M")


@dataclass(frozen=True)
class ModelFamily:
    """One form of a block's seven linears (q, k, v, o, gate, up, down); others are subclasses."""

    name: str  # the value of ``LlamaArgs.family``
    low_rank: bool = True  # whether the linears are factorised, or dense
    lanes: bool = False  # whether the model can have CAAT-Net's lanes
    # Whether a block gives its latents A x to the next one, also across pipeline stages.
    carries_latents: bool = False
    gated: bool = False  # whether the carried latents may have a learned factor g per linear
    # Whether its factors approximate a given matrix, W ≈ B A, so that a dense model is a start
    # for it. Then nothing may act between them.
    factorises: bool = False

    @property
    def model_name(self) -> str:
        """The value of ``model.name``."""
        return _PREFIX + self.name

    def defaults(self, size: str, rank: int) -> dict[str, Any]:
        """Return the family's ``rank_attention``, ``rank_ffn`` and ``activation`` of a flavor."""
        # svd has CoLA's ranks, so that the two compare, and LLaMA's SwiGLU: the model then merges.
        rank = rank if self.low_rank else 0
        activation = "both" if size in KEEPS_OUTER_SILU else "lowrank"
        if self.factorises or not self.low_rank:
            activation = "fullrank"
        return {"rank_attention": rank, "rank_ffn": rank, "activation": activation}

    def build_linear(
        self, args: "LlamaArgs", d_in: int, d_out: int, rank: int, first_block: bool
    ) -> nn.Linear | LowRankLinear:
        """Build one linear of a block; the first block receives no latents, and has no gates."""
        if not self.low_rank:
            return nn.Linear(d_in, d_out, bias=False)
        return LowRankLinear(d_in, d_out, rank, args.learns_gates and not first_block)

    def act(self, latents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Act on the latents (b, s, r) of a group, after LaX's additions and in front of σ."""
        # Plans may hold a latent in shards along r: each element is changed by itself.
        return latents

    def check(self, args: "LlamaArgs") -> None:
        """Refuse arguments that the family cannot have, by a ConfigError."""
        merges = args.activation in ("fullrank", "none")
        want = f"'fullrank' or 'none' for {self.model_name} "
        want += "(with σ in the bottleneck it is llama_cola)"
        require(merges or not self.factorises, "low_rank.activation", args.activation, want)
        others = " or ".join(family.model_name for family in FAMILIES.values() if family.lanes)
        want = f"1 for {self.model_name}: only {others} has lanes"
        require(args.lanes == 1 or self.lanes, "caat.lanes", args.lanes, want)

    def check_overrides(self, section: LowRank) -> None:
        """Refuse keys of ``[low_rank]`` that would have no effect, by a ConfigError."""
        unused = [] if self.low_rank else ["rank", "rank_attention", "rank_ffn", "activation"]
        unused += [] if self.gated else ["lax_gate"]
        for name in unused:
            value, default = getattr(section, name), getattr(LowRank(), name)
            want = f"{default!r} for {self.model_name}, where it has no effect"
            require(value == default, f"low_rank.{name}", value, want)


FAMILIES: dict[str, ModelFamily] = {
    family.name: family
    for family in (
        ModelFamily("full", low_rank=False, lanes=True),
        ModelFamily("svd", factorises=True),
        ModelFamily("cola"),
        ModelFamily("lax", carries_latents=True, gated=True),
    )
}
"""Families by name; `training.register.register_model_family` adds others."""


def find_family(model_name: str) -> ModelFamily | None:
    """Return the family of a ``model.name``, None for another package's model."""
    if not model_name.startswith(_PREFIX):
        return None
    return FAMILIES.get(model_name.removeprefix(_PREFIX))
