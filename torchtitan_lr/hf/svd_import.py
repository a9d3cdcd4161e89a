# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Factorise the linears of a ``llama_full`` block by block, as its weights are read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.shards import Tensors, WeightSource
from torchtitan_lr.hf.truncation import truncate
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.llama import TransformerBlock, build_freqs_cis
from torchtitan_lr.titan import IGNORE_INDEX

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

_EDGES = {"attention.wo": "attention.o", "feed_forward.w2": "feed_forward.out"}

Batch = tuple[dict[str, Tensor], Tensor]
"""``({"input": (b, s)}, labels (b, s))``; tokens without a label are padding."""


@dataclass(frozen=True)
class MatrixReport:
    """The loss by truncating one matrix.

    Attributes:
        name: Its name, ``layers.0.attention.wq``.
        shape: (d_out, d_in).
        rank: Rank r of the factors.
        error: |W - B A| / |W|.
        weighted_error: The same over the calibration inputs; None without them.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    error: float
    weighted_error: float | None


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


class TruncatedWeights:
    """The weights of the factorised model; reading a block's first factor factorises the block.

    Read in the model's order, one block's dense weights and factors are in memory, and with a
    calibration text its residual stream, (tokens, d) in fp32.

    Args:
        source: The dense model's weights.
        args: Result of `factorised_args`.
        calibration: Batches of tokens whose activations in the dense model weigh the errors; None
            for the plain SVD.
        device: Where to compute.
        report: Called for every matrix.
    """

    def __init__(
        self,
        source: WeightSource,
        args: LlamaArgs,
        calibration: Iterable[Batch] | None = None,
        device: str = "cpu",
        report: Callable[[MatrixReport], object] = lambda report: None,
    ) -> None:
        self.args = args
        self.reports: list[MatrixReport] = []
        self._source, self.dtype = source, source.dtype
        self._device = device
        self._report = report
        self.shapes = model_shapes(args)
        self._factors: Tensors = {}
        self._next = 0
        self._stream = None
        if calibration is not None:
            self._stream = CalibrationStream(source, calibration, device)

    def read(self, names: Sequence[str]) -> Tensors:
        """Read parameters onto the CPU, each factor once."""
        found = self._source.read([name for name in names if name in self._source.shapes])
        for name in (name for name in names if name not in found):
            while name not in self._factors:
                self._factorise(self._next)
                self._next += 1
            found[name] = self._factors.pop(name)
        return found

    def _factorise(self, index: int) -> None:
        prefix = f"layers.{index}."
        names = [name for name in self._source.shapes if name.startswith(prefix)]
        weights = self._source.read(names)
        moments: Tensors = {}
        if self._stream is not None:
            moments = self._stream.advance(
                index, {n.removeprefix(prefix): weights[n] for n in names}
            )
        for order, (linear, first) in enumerate(SHARED_INPUTS.items()):
            weight = weights.pop(f"{prefix}{linear}.weight").to(self._device)
            is_ffn = linear.startswith("feed_forward")
            rank = self.args.rank_ffn if is_ffn else self.args.rank_attention
            seed = index * len(SHARED_INPUTS) + order
            found = truncate(weight, rank, moments[first] if moments else None, seed)
            for letter, factor in (("A", found.A), ("B", found.B)):
                self._factors[f"{prefix}{linear}.{letter}.weight"] = factor.to("cpu", self.dtype)
            errors = found.error, found.weighted_error
            made = MatrixReport(prefix + linear, tuple(weight.shape), rank, *errors)
            self.reports.append(made)
            self._report(made)


class CalibrationStream:
    """The residual stream of a text in the dense model, carried from block to block.

    Args:
        source: The dense model's weights.
        batches: The text's tokens.
        device: Where to compute.

    Raises:
        ConfigError: The calibration text has no tokens.
    """

    def __init__(self, source: WeightSource, batches: Iterable[Batch], device: str) -> None:
        self._args = source.args
        self._device = device
        name = "tok_embeddings.weight"
        embedding = source.read([name])[name].float()
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
    def advance(self, index: int, weights: Tensors) -> Tensors:
        """Run one block on the stream.

        Args:
            index: The block; the next one at every call.
            weights: Its weights, by their names within the block.

        Returns:
            The second moments XᵀX / n of the inputs X (n, d_in) of each linear that is the first
            of `SHARED_INPUTS`, fp64, on the device.
        """
        with torch.device("meta"):
            block = TransformerBlock(index, self._args)
        block.to_empty(device=self._device).float()
        block.load_state_dict(weights)
        moments: Tensors = {}
        valid = torch.empty(0)

        def note(first: str, linear: Any, inputs: tuple[Tensor]) -> None:
            x = inputs[0][valid].double()
            product = x.T @ x / self.tokens
            moments[first] = moments[first] + product if first in moments else product

        for first in set(SHARED_INPUTS.values()):
            # The block calls the edges of `_EDGES`, not the linears behind them.
            linear = block.get_submodule(_EDGES.get(first, first))
            linear.register_forward_pre_hook(lambda m, x, first=first: note(first, m, x))
        for number, (x, mask) in enumerate(self._batches):
            valid = mask.to(self._device)
            out, _ = block(x.to(self._device), self._table, None)
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
