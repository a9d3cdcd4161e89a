# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A head that reads its weights in eight bits, and computes exactly the logits that can be drawn.

The head is full-rank in every family: of the weights that a token of CoLA 60M meets it has 62%.
Generation needs few of its products: the largest one, or the k largest ones. A row w of the head
is w = s c + e with codes c of eight bits and a scale s, a hidden state x = t p + f likewise, so
that

    |<w, x> - s t <c, p>| <= ‖e‖ ‖x‖ + ‖s c‖ ‖f‖

by the Cauchy-Schwarz inequality. A token whose upper bound is below the k-th largest lower bound is
not among the k most likely ones. The logits of the others are computed from the weights themselves;
if there are too many of them, all logits are. Which token is drawn does not change.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.compat.products import int8_product
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.layers import HeadEdge

_LEVELS = 127

_SLACK = 2.0**-14
"""Share of ‖w‖ ‖x‖ for the rounding of fp32 sums, well above d · 2^-24."""

_MOST = 16
"""If more than this part of the vocabulary is left, all logits are computed."""


class ScreenedHead(nn.Module):
    """The final norm, and the logits of the tokens that can be drawn; an edge of the head.

    Its codes need a byte per weight beside the weights.

    Args:
        weight: The head's weight (V, d).
        kept: The number k of most likely tokens that are needed: 1 for greedy tokens.
    """

    codes: Tensor
    scale: Tensor
    weight_error: Tensor
    code_norm: Tensor

    def __init__(self, weight: Tensor, kept: int = 1) -> None:
        super().__init__()
        weight = weight.detach()
        self.kept = min(kept, len(weight))
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-30).float() / _LEVELS
        codes = (weight / scale).round()
        norm = weight.norm(dim=1).float()
        left = (weight - codes * scale).norm(dim=1).float()
        self.register_buffer("codes", codes.to(torch.int8), persistent=False)
        self.register_buffer("scale", scale[:, 0], persistent=False)
        self.register_buffer("weight_error", left + _SLACK * norm, persistent=False)
        self.register_buffer("code_norm", norm + left, persistent=False)

    def forward(self, x: Tensor, norm: nn.Module | None, output: nn.Linear) -> Tensor:
        """Compute logits.

        Args:
            x: Residual stream (b, 1, d).
            norm: The final norm.
            output: The head; its weight is that of the codes.

        Returns:
            Logits (b, 1, V), exact for every token that can be drawn and -inf for some others.
        """
        x = x if norm is None else norm(x)
        rows = x[:, 0]
        lower, upper = self.bounds(rows)
        limit = lower.topk(self.kept).values[:, -1:] if self.kept > 1 else lower.amax(1, True)
        row, token = (upper >= limit).nonzero(as_tuple=True)
        if len(row) * _MOST > upper.numel():
            return F.linear(x, output.weight)
        exact = (rows[row] * output.weight[token]).sum(-1)
        logits = rows.new_full(upper.shape, float("-inf"))
        logits[row, token] = exact
        return logits[:, None]

    def bounds(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return lower and upper bounds (b, V) of the logits of rows (b, d), in fp32."""
        rows = rows.float()
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / _LEVELS
        codes = (rows / scale).round()
        left = (rows - codes * scale).norm(dim=1, keepdim=True)
        estimate = int8_product(codes.to(torch.int8), self.codes) * (scale * self.scale)
        error = self.weight_error * rows.norm(dim=1, keepdim=True) + self.code_norm * left
        return estimate - error, estimate + error


def screen_head(model: nn.Module, kept: int = 1) -> None:
    """Let a model in one process compute only the logits that can be drawn, in place.

    Args:
        model: A `LlamaModel` on one device.
        kept: The number k of most likely tokens that are needed: 1 for greedy tokens.

    Raises:
        ConfigError: The head is split over ranks or lanes.
    """
    output = model.get_submodule("output")
    head = output.get_submodule("head")
    if not isinstance(head, HeadEdge):
        want = "no such option: the head is split over ranks or lanes"
        raise ConfigError("--screen_head", type(head).__name__, want)
    output.register_module("head", ScreenedHead(output.get_parameter("weight"), kept))
