# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``llama_full``: LLaMA as it is, the baseline of the low-rank families.

    y = W x

`models.linears.ColumnEdge` applies W to a group of linears; with CAAT-Net's lanes the edges of
`models.lanes` do.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families.family import ModelFamily

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs


class Full(ModelFamily):
    """Dense linears: y = W x."""

    name = "full"
    low_rank = False

    def defaults(self, size: str) -> dict[str, Any]:
        """No ranks, and SwiGLU's own SiLU, at every size."""
        return {"rank_attention": 0, "rank_ffn": 0, "activation": "fullrank"}

    def build_linear(
        self, args: "LlamaArgs", d_in: int, d_out: int, rank: int, first_block: bool
    ) -> nn.Linear:
        """Build W (d_out, d_in), without bias."""
        return nn.Linear(d_in, d_out, bias=False)

    def check_overrides(self, section: Any) -> None:
        """Refuse every key of ``[low_rank]``: there are no factors and no bottlenecks."""
        for name in ("rank", "rank_attention", "rank_ffn"):
            if getattr(section, name) != 0:
                want = f"0 for {self.model_name}, which has no low-rank factors"
                raise ConfigError(f"low_rank.{name}", getattr(section, name), want)
        if section.activation not in ("flavor", "fullrank"):
            want = f"'flavor' for {self.model_name}, which has no bottlenecks"
            raise ConfigError("low_rank.activation", section.activation, want)
        super().check_overrides(section)

    def fingerprint(self, args: "LlamaArgs") -> dict[str, Any]:
        """Return nothing: the shape identifies the model."""
        return {}

    def is_llama(self, args: "LlamaArgs") -> bool:
        """Return True."""
        return True
