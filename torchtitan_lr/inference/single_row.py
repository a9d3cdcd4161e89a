# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Edges of a compiled step that multiply one row.

One row times a weight reads the weight once and does nothing else: memory limits it. On CPUs the
libraries behind ``F.linear`` reach less than half of the memory's speed there. As an element-wise
product and a sum, the compiler generates one loop over the weight's rows, which reaches it, and
which it fuses with what comes before and after. More rows, devices other than CPUs and eager calls
take ``F.linear``.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.models.layers import DenseEdge, DownEdge, HeadEdge, LowRankLinear, UpEdge


def row_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a linear map.

    Args:
        x: Input (b, s, d_in).
        weight: (d_out, d_in).

    Returns:
        Tensor (b, s, d_out).
    """
    one_row = x.shape[0] == 1 and x.shape[1] == 1
    if one_row and x.device.type == "cpu" and torch.compiler.is_compiling():
        return (x * weight).sum(-1).unsqueeze(0)
    return F.linear(x, weight)


class RowDenseEdge(DenseEdge):
    """`DenseEdge` by `row_linear`."""

    def forward(
        self, x: Tensor, linears: Sequence[nn.Linear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Apply the group, see `DenseEdge.forward`."""
        x = x if norm is None else norm(x)
        return [row_linear(x, linear.weight) for linear in linears]


class RowDownEdge(DownEdge):
    """`DownEdge` by `row_linear`."""

    takes_gated = False

    def forward(  # type: ignore[override]
        self, x: Tensor, linears: Sequence[LowRankLinear], norm: nn.Module | None = None
    ) -> list[Tensor]:
        """Apply A of the group, see `DownEdge.forward`."""
        x = x if norm is None else norm(x)
        return [row_linear(x, linear.A.weight) for linear in linears]


class RowUpEdge(UpEdge):
    """`UpEdge` by `row_linear`; its latents are activated."""

    applies_silu = False

    def forward(  # type: ignore[override]
        self, latents: Sequence[Tensor], linears: Sequence[LowRankLinear]
    ) -> list[Tensor]:
        """Apply B of the group, see `UpEdge.forward`."""
        pairs = zip(latents, linears, strict=True)
        return [row_linear(latent, linear.B.weight) for latent, linear in pairs]


class RowHeadEdge(HeadEdge):
    """`HeadEdge` by `row_linear`."""

    def forward(self, x: Tensor, norm: nn.Module | None, output: nn.Linear) -> Tensor:
        """Compute logits, see `HeadEdge.forward`."""
        return row_linear(x if norm is None else norm(x), output.weight)


_ROW_EDGES: dict[type[nn.Module], type[nn.Module]] = {
    DenseEdge: RowDenseEdge,
    DownEdge: RowDownEdge,
    UpEdge: RowUpEdge,
    HeadEdge: RowHeadEdge,
}


def use_row_edges(model: nn.Module) -> None:
    """Replace the edges of a model in one process; plans and lanes keep their own.

    Args:
        model: The model; changed in place, its weights are not.
    """
    for module in list(model.modules()):
        for name, edge in list(module.named_children()):
            if type(edge) in _ROW_EDGES:
                module.register_module(name, _ROW_EDGES[type(edge)]())
