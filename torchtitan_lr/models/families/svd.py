# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``llama_svd``: plain factorisation (Kamalakara et al., 2022), the baseline without σ.

    y = B A x,    A (r, d_in),  B (d_out, r)

`models.linears.low_rank_group` applies it, with no σ in the bottleneck. B A is a matrix, so that a
trained model merges into a full-rank LLaMA. The way back is not unique.
"""

from typing import TYPE_CHECKING, Any

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families.cola import RANKS
from torchtitan_lr.models.families.family import ModelFamily

if TYPE_CHECKING:
    from torchtitan_lr.models.args import LlamaArgs


class SVD(ModelFamily):
    """Factors without a nonlinearity between them: y = B A x."""

    name = "svd"
    factorises = True

    def defaults(self, size: str) -> dict[str, Any]:
        """CoLA's ranks, so that the two compare, and LLaMA's SwiGLU: the model then merges."""
        rank = RANKS[size]
        return {"rank_attention": rank, "rank_ffn": rank, "activation": "fullrank"}

    def check(self, args: "LlamaArgs") -> None:
        """Refuse a nonlinearity in the bottlenecks, beside what all families refuse."""
        if args.activation not in ("fullrank", "none"):
            want = (
                f"'fullrank' or 'none' for {self.model_name} "
                "(with σ in the bottleneck it is llama_cola)"
            )
            raise ConfigError("low_rank.activation", args.activation, want)
        super().check(args)

    def is_llama(self, args: "LlamaArgs") -> bool:
        """With SwiGLU's own SiLU, and W = B A."""
        return args.activation == "fullrank"

    def check_import(self) -> None:
        """Refuse: many pairs of factors have the same product."""
        want = f"llama_full: a full-rank matrix does not determine the factors of {self.model_name}"
        raise ConfigError("model.name", self.model_name, want)
