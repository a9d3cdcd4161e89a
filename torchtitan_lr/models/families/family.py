# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a model family is: the form of its linears, its default settings, and what it refuses.

Each family is one class, in a file of its own: `full`, `svd`, `cola`, `lax`. Nothing here depends
on ranks or on training. How a family is split is in `parallel.parallelize`; its parameters,
products and messages are stated independently by `formulas`.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.linears import LowRankLinear

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs

_PREFIX = "llama_"


class ModelFamily:
    """One form of a block's seven linears (q, k, v, o, gate, up, down); a subclass is a family.

    The defaults below are those of a low-rank family without carried latents.

    Attributes:
        name: The value of ``LlamaArgs.family``.
        low_rank: Whether the linears are factorised; else they are dense.
        lanes: Whether the model can have CAAT-Net's lanes.
        carries_latents: Whether a block gives its latents A x to the next one, which then also
            cross pipeline stages. The plans put their own edge in place of `build_mix`'s.
        gated: Whether the key ``low_rank.lax_gate`` has a choice.
        factorises: Whether its factors approximate a given matrix, W ≈ B A, so that a dense model
            is a start for it.
    """

    name: str
    low_rank: bool = True
    lanes: bool = True
    carries_latents: bool = False
    gated: bool = False
    factorises: bool = False

    @property
    def model_name(self) -> str:
        """The value of ``model.name``."""
        return _PREFIX + self.name

    def defaults(self, size: str) -> dict[str, Any]:
        """Return the family's own settings of a flavor.

        Returns:
            Fields of `LlamaArgs`: ``rank_attention``, ``rank_ffn`` and ``activation``.
        """
        raise NotImplementedError

    def build_linear(
        self, args: "LlamaArgs", d_in: int, d_out: int, rank: int, first_block: bool
    ) -> nn.Linear | LowRankLinear:
        """Build one linear of a block.

        Args:
            args: The model's arguments.
            d_in: Input width.
            d_out: Output width.
            rank: Rank r of the linear's group; 0 at full rank.
            first_block: Whether it belongs to the first block, which receives no latents.

        Returns:
            A `LowRankLinear` with A (r, d_in) and B (d_out, r); at full rank an ``nn.Linear``
            without bias.
        """
        return LowRankLinear(d_in, d_out, rank)

    def build_mix(self) -> nn.Module | None:
        """Build the edge between A and σ, see `models.linears.low_rank_group`; None without one.

        Plans may hold a latent in shards along r. Without carried latents the edge must therefore
        act on each element by itself.
        """
        return None

    def check(self, args: "LlamaArgs") -> None:
        """Refuse arguments that the family cannot have.

        Raises:
            ConfigError: With the first value that does not fit.
        """
        if args.lanes > 1 and not self.lanes:
            want = f"1 for {self.model_name}, whose latents would be lanes"
            raise ConfigError("caat.lanes", args.lanes, want)

    def check_overrides(self, section: Any) -> None:
        """Refuse keys of ``[low_rank]`` that would have no effect.

        Raises:
            ConfigError: With the first key that is set in vain.
        """
        if section.lax_gate != "identity" and not self.gated:
            others = " or ".join(family.model_name for family in FAMILIES.values() if family.gated)
            want = f"'identity' unless {others}"
            raise ConfigError("low_rank.lax_gate", section.lax_gate, want)

    def fingerprint(self, args: "LlamaArgs") -> dict[str, Any]:
        """Return what the family adds to a checkpoint's fingerprint, by TOML key."""
        return {
            "low_rank.rank_attention": args.rank_attention,
            "low_rank.rank_ffn": args.rank_ffn,
            "low_rank.activation": args.activation,
        }

    def is_llama(self, args: "LlamaArgs") -> bool:
        """Return whether a model without private channels of lanes equals a full-rank LLaMA."""
        return False

    def check_import(self) -> None:
        """Refuse to take over a LLaMA's full-rank weights where they do not determine the model's.

        Raises:
            ConfigError: They do not.
        """


FAMILIES: dict[str, ModelFamily] = {}
"""Families by name; `registry` registers those of this package."""


def register_family(family: ModelFamily) -> None:
    """Make a family a value of ``LlamaArgs.family``.

    To train it, it also needs flavors and a TrainSpec: `training.register.register_model_family`.
    """
    FAMILIES[family.name] = family


def find_family(model_name: str) -> ModelFamily | None:
    """Return the family of a ``model.name``, None for another package's model."""
    if not model_name.startswith(_PREFIX):
        return None
    return FAMILIES.get(model_name.removeprefix(_PREFIX))
