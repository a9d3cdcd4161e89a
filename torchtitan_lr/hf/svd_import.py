# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Factorise the linears of a ``llama_full`` block by block."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.truncation import truncate
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.llama import Rows, TransformerBlock, build_freqs_cis
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.training.loading import Weights

SHARED_INPUTS = {
    "attention.wq": "attention.wq",
    "attention.wk": "attention.wq",
    "attention.wv": "attention.wq",
    "attention.wo": "attention.wo",
    "feed_forward.w1": "feed_forward.w1",
    "feed_forward.w3": "feed_forward.w1",
    "feed_forward.w2": "feed_forward.w2",
}
"""The linears of a block, each with the first one that has the same input."""

_GROUPS = {"attention.wo": "attention.o", "feed_forward.w2": "feed_forward.out"}

Batch = tuple[dict[str, Tensor], Tensor]
"""``({"input": (b, s)}, labels (b, s))``; tokens without a label are padding."""


@dataclass(frozen=True)
class MatrixReport:
    """The loss by truncating one matrix."""

    name: str
    """``layers.0.attention.wq``"""
    shape: tuple[int, ...]
    """(d_out, d_in)"""
    rank: int
    error: float
    """|W - B A| / |W|"""
    weighted_error: float | None
    """The same over the calibration inputs; None without them."""


def factorised_args(args: LlamaArgs, family: ModelFamily, rank: int) -> LlamaArgs:
    """Return the arguments of the factorised model.

    Raises:
        ConfigError: The rank is too large or too small.
    """
    largest = min(args.dim, args.ffn_dim)
    if not 0 < rank <= largest:
        raise ConfigError("--rank", rank, f"a rank from 1 to {largest}, the model's smallest width")
    return replace(
        args, family=family.name, activation="fullrank", rank_attention=rank, rank_ffn=rank
    )


def factorise(
    args: LlamaArgs,
    weights: Weights,
    made: LlamaArgs,
    calibration: Iterable[Batch] | None = None,
    device: str = "cpu",
    report: Callable[[MatrixReport], object] = lambda report: None,
) -> tuple[Weights, list[MatrixReport]]:
    """Factorise a dense model block by block.

    Args:
        args: The dense model's arguments.
        weights: Its weights; those that are factorised are taken out of it.
        made: Result of `factorised_args`.
        calibration: Batches of tokens whose activations in the dense model weigh the errors; None
            for the plain SVD.
        device: Where to compute.
        report: Called for every matrix.

    Returns:
        The weights of the factorised model, in its order, and one report per matrix.

    Raises:
        ConfigError: The calibration text has no tokens.
    """
    stream = None if calibration is None else CalibrationStream(args, weights, calibration, device)
    reports = list[MatrixReport]()
    for index in range(args.n_layers):
        prefix = f"layers.{index}."
        block = {n.removeprefix(prefix): weights[n] for n in weights if n.startswith(prefix)}
        moments = {} if stream is None else stream.advance(index, block)
        for order, (linear, first) in enumerate(SHARED_INPUTS.items()):
            weight = weights.pop(f"{prefix}{linear}.weight")
            rank = made.rank_ffn if linear.startswith("feed_forward") else made.rank_attention
            seed = index * len(SHARED_INPUTS) + order
            cut = truncate(weight.to(device), rank, moments[first] if moments else None, seed)
            for letter, factor in (("A", cut.A), ("B", cut.B)):
                weights[f"{prefix}{linear}.{letter}.weight"] = factor.to("cpu", weight.dtype)
            shape = tuple(weight.shape)
            each = MatrixReport(prefix + linear, shape, rank, cut.error, cut.weighted_error)
            reports.append(each)
            report(each)
    return {name: weights[name] for name in model_shapes(made)}, reports


class CalibrationStream:
    """The residual stream of a text in the dense model, carried from block to block.

    Raises:
        ConfigError: The calibration text has no tokens.
    """

    def __init__(
        self, args: LlamaArgs, weights: Weights, batches: Iterable[Batch], device: str
    ) -> None:
        self._args, self._device = args, device
        embedding = weights["tok_embeddings.weight"].float()
        self._batches: list[tuple[Tensor, Tensor]] = []
        for inputs, labels in batches:
            self._batches.append((embedding[inputs["input"]], labels != IGNORE_INDEX))
        self.tokens = sum(int(valid.sum()) for _, valid in self._batches)
        if not self.tokens:
            raise ConfigError("--calibration", "no tokens", "a text with at least two tokens")
        length = max(valid.shape[1] for _, valid in self._batches)
        with torch.device(device):
            rotary = (self._args.rope_theta, self._args.rope_scaling)
            self._table = torch.view_as_real(build_freqs_cis(self._args.head_dim, length, *rotary))

    @torch.no_grad()
    def advance(self, index: int, weights: Weights) -> Weights:
        """Run the next block, with its weights by their names within it, on the stream.

        Returns:
            The second moments XᵀX / n of the inputs X (n, d_in) of each linear that is the first
            of `SHARED_INPUTS`, fp64, on the device.
        """
        with torch.device("meta"):
            block = TransformerBlock(index, self._args)
        block.to_empty(device=self._device).float()
        block.load_state_dict(weights)
        moments: Weights = {}
        valid = torch.empty(0)

        def note(first: str, linear: Any, inputs: tuple[Tensor]) -> None:
            x = inputs[0][valid].double()
            product = x.T @ x / self.tokens
            moments[first] = moments[first] + product if first in moments else product

        for first in set(SHARED_INPUTS.values()):
            # The block calls the modules of `_GROUPS`, not the linears behind them.
            linear = block.get_submodule(_GROUPS.get(first, first))
            linear.register_forward_pre_hook(lambda m, x, first=first: note(first, m, x))
        for number, (x, mask) in enumerate(self._batches):
            valid = mask.to(self._device)
            out, _ = block(x.to(self._device), Rows(self._table))
            self._batches[number] = (out.cpu(), mask)
        return moments


def limit_tokens(batches: Iterable[Batch], tokens: int) -> Iterable[Batch]:
    """Yield batches until they have a number of tokens; the last one may go beyond it."""
    left = tokens
    for inputs, labels in batches:
        if left <= 0:
            return
        left -= int((labels != IGNORE_INDEX).sum())
        yield inputs, labels


def check_factorisable(args: LlamaArgs, name: str) -> ModelFamily:
    """Return the family that a dense model may become.

    Raises:
        ConfigError: No dense model determines a start of that family, or this one is not dense.
    """
    family = FAMILIES[name]
    if not family.factorises:
        can = " or ".join(
            key for key, one in FAMILIES.items() if one.factorises or not one.low_rank
        )
        want = f"{can}: a nonlinearity in the bottleneck has no counterpart in a dense model"
        raise ConfigError("--family", name, want)
    if args.low_rank or args.lanes > 1:
        want = f"no such option for a {args.model_family.model_name} with {args.lanes} lanes"
        raise ConfigError("--family", name, f"{want}: a dense LLaMA is factorised")
    return family
