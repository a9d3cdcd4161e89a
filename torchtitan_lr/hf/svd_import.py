# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Factorise the linears of a ``llama_full`` block by block: truncated SVD, plain or weighted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_lr.console.terminal import progress
from torchtitan_lr.errors import require
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.llama import Rows, TransformerBlock, build_freqs_cis
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.training.loading import Weights

SHARED_INPUTS = {  # the linears of a block, each with the first one that has the same input
    "attention.wq": "attention.wq",
    "attention.wk": "attention.wq",
    "attention.wv": "attention.wq",
    "attention.wo": "attention.wo",
    "feed_forward.w1": "feed_forward.w1",
    "feed_forward.w3": "feed_forward.w1",
    "feed_forward.w2": "feed_forward.w2",
}
_GROUPS = {"attention.wo": "attention.o", "feed_forward.w2": "feed_forward.out"}

# Added to the diagonal of the second moments, in units of its mean: it orders the directions that
# the calibration text never uses.
RIDGE = 1e-8

Batch = tuple[dict[str, Tensor], Tensor]
"""``({"input": (b, s)}, labels (b, s))``; tokens without a label are padding."""


@dataclass(frozen=True)
class MatrixReport:
    """The loss by truncating one matrix."""

    name: str  # ``layers.0.attention.wq``
    shape: tuple[int, ...]  # (d_out, d_in)
    rank: int
    error: float  # |W - B A| / |W|, Frobenius norms
    # |(W - B A) X| / |W X| over the calibration inputs X; None without them.
    weighted_error: float | None


def factorise(
    args: LlamaArgs,
    weights: Weights,
    made: LlamaArgs,
    calibration: Iterable[Batch] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Weights, list[MatrixReport]]:
    """Factorise a dense model block by block on a device; return the weights of ``made``.

    ``weights``, which may lie in files, lose each matrix when its factors are made: beside these
    one block is in memory. The calibration's activations in the dense model weigh the errors; a
    ConfigError says that it has no tokens.
    """
    moments: Iterator[Weights] = iter(())
    if calibration is not None:
        moments = calibration_moments(args, weights, calibration, device)
    reports = list[MatrixReport]()
    for index in progress(range(args.n_layers), "factorising", args.n_layers, "blocks"):
        known: Weights = next(moments, {})
        for order, (linear, first) in enumerate(SHARED_INPUTS.items()):
            name = f"layers.{index}.{linear}"
            weight = weights.pop(f"{name}.weight")
            rank = made.rank_ffn if linear.startswith("feed_forward") else made.rank_attention
            seed = index * len(SHARED_INPUTS) + order
            A, B, error, weighted = truncate(weight.to(device), rank, known.get(first), seed)
            weights[f"{name}.A.weight"] = A.to("cpu", dtype)
            weights[f"{name}.B.weight"] = B.to("cpu", dtype)
            reports.append(MatrixReport(name, tuple(weight.shape), rank, error, weighted))
    return {name: weights[name].to(dtype) for name in model_shapes(made)}, reports


@torch.no_grad()
def calibration_moments(
    args: LlamaArgs, weights: Weights, batches: Iterable[Batch], device: str
) -> Iterator[Weights]:
    """Yield each block's second moments XᵀX / n of a text's inputs X (n, d_in), fp64.

    They have the names of the linears that are the first of `SHARED_INPUTS`. The residual stream of
    the text in the dense model is carried, in fp32, from block to block.
    """
    embedding = weights["tok_embeddings.weight"]
    stream = list[tuple[Tensor, Tensor]]()  # (b, s, d) and the valid tokens (b, s)
    for inputs, labels in batches:
        stream.append((embedding[inputs["input"]].float(), labels != IGNORE_INDEX))
    tokens = sum(int(valid.sum()) for _, valid in stream)
    require(tokens, "--calibration", "no tokens", "a text with at least two tokens")
    length = max(valid.shape[1] for _, valid in stream)
    with torch.device(device):
        table = build_freqs_cis(args.head_dim, length, args.rope_theta, args.rope_scaling)
        table = torch.view_as_real(table)
    for index in range(args.n_layers):
        with torch.device("meta"):
            block = TransformerBlock(index, args)
        block.to_empty(device=device).float()
        prefix = f"layers.{index}."
        block.load_state_dict(
            {n.removeprefix(prefix): weights[n] for n in weights if n.startswith(prefix)}
        )
        yield _advance(block, stream, table, tokens)


def _advance(
    block: Any, stream: list[tuple[Tensor, Tensor]], table: Tensor, tokens: int
) -> Weights:
    """Run a block on the stream; return the second moments of its linears' inputs."""
    moments: Weights = {}
    valid = torch.empty(0)

    def note(first: str, x: Tensor) -> None:
        x = x[valid].double()
        moments[first] = moments.get(first, 0) + x.T @ x / tokens

    for first in set(SHARED_INPUTS.values()):
        # The block calls the modules of `_GROUPS`, not the linears behind them.
        linear = block.get_submodule(_GROUPS.get(first, first))
        linear.register_forward_pre_hook(lambda _, x, first=first: note(first, x[0]))
    for number, (x, mask) in enumerate(stream):
        valid = mask.to(table.device)
        out, _ = block(x.to(table.device), Rows(table))
        stream[number] = (out.cpu(), mask)
    return moments


def truncate(
    weight: Tensor, rank: int, moments: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, float, float | None]:
    """Compute the best factors A (r, d_in), B (d_out, r) of W (d_out, d_in), in fp64.

    Plain, they minimise |W - B A|: the truncated SVD (Eckart-Young). With the second moments C =
    X Xᵀ (d_in, d_in), up to a factor, of the inputs X they minimise |(W - B A) X|: with any S such
    that S Sᵀ = C and W S = U Σ Vᵀ, B A = U_r Σ_r V_rᵀ S⁻¹ (SVD-LLM, Wang et al., 2024, section 3.1,
    whose S is Cholesky's). It is computed as B A = U_r U_rᵀ W, the same matrix, for which S need
    not have an inverse, and S is C's root by eigenvectors.

    Both factors then get the root of B A's singular values: A Aᵀ = Bᵀ B.

    Above the smaller side of W, surplus rows of A are random, of the size of the others, and
    surplus columns of B zero: B A does not change, and both train.

    The errors of a `MatrixReport` follow.
    """
    weight = weight.double()
    root = None
    if moments is not None:  # S with S Sᵀ = C plus the ridge
        values, vectors = torch.linalg.eigh(moments.double())
        ridge = RIDGE * moments.double().diagonal().mean()
        root = vectors * (values.clamp(min=0) + ridge).sqrt()
    used = min(rank, *weight.shape)
    left = torch.linalg.svd(weight if root is None else weight @ root, full_matrices=False)[0]
    left = left[:, :used]
    inner, sizes, right = torch.linalg.svd(left.T @ weight, full_matrices=False)
    scale = sizes.sqrt()
    A, B = scale[:, None] * right, (left @ inner) * scale
    difference = weight - B @ A
    error = _ratio(difference, weight)
    weighted = None if root is None else _ratio(difference @ root, weight @ root)
    if rank > used:
        generator, more = torch.Generator().manual_seed(seed), rank - used
        rows = torch.randn(more, A.shape[1], generator=generator, dtype=A.dtype).to(A.device)
        A, B = torch.cat([A, rows * A.std()]), torch.cat([B, B.new_zeros(B.shape[0], more)], dim=1)
    return A, B, error, weighted


def _ratio(difference: Tensor, whole: Tensor) -> float:
    """Return |difference| / |whole|, 0 for a zero matrix."""
    size = float(whole.norm())
    return float(difference.norm()) / size if size else 0.0
