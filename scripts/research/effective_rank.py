# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Effective rank of activations: CoLA's motivation (section 3.1, Eq. 1).

r(α) is the smallest k such that the k largest singular values contain a share α of the energy Σσ²
of an activation matrix (tokens × width). The mean is not subtracted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_lr.models.llama import LlamaModel

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linears of a block in the model's order."""

_GROUPS = {
    "attention": {"qkv": ("q", "k", "v"), "o": ("o",)},
    "feed_forward": {"gate_up": ("gate", "up"), "out": ("down",)},
}


@dataclass(frozen=True)
class Spectrum:
    """The squared singular values of one activation matrix.

    Args:
        block: Index of the block.
        projection: One of `PROJECTIONS`; ``hidden`` is the input of the down projection, the
            activation of CoLA's Figure 2.
        what: ``output`` (of the linear) or ``latent`` (the input of its B, of width r).
        width: Columns of the matrix.
        energies: σ², largest first, fp64 ``(min(tokens, width),)``.
    """

    block: int
    projection: str
    what: str
    width: int
    energies: Tensor


def energies(activation: Tensor) -> Tensor:
    """Return the squared singular values of a matrix, largest first.

    They are the eigenvalues of the smaller Gram matrix in fp64. The loss of precision, below 1e-16
    of the largest, is negligible in a sum of squares.

    Args:
        activation: (n, d), of any dtype.

    Returns:
        (min(n, d),) in fp64, non-negative.
    """
    matrix = activation.double()
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0)


def effective_rank(squares: Tensor, alpha: float) -> int:
    """Return r(α), Eq. 1 of CoLA.

    Args:
        squares: σ², largest first.
        alpha: Required share of their sum, 0 < α ≤ 1.

    Returns:
        The smallest k with a share of at least α; 0 for a matrix of zeros.

    Raises:
        ValueError: If α is out of range.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, expected above 0 and at most 1")
    sums = squares.cumsum(0)
    if not len(sums) or sums[-1] == 0:
        return 0
    # The last cumulative sum divided by itself is exactly 1, so α = 1 is always reached.
    return int((sums / sums[-1] < alpha).sum()) + 1


@torch.no_grad()
def activation_spectra(model: LlamaModel, tokens: Tensor) -> list[Spectrum]:
    """Run a model once and compute the spectrum of every projection of every block.

    Activations are processed one at a time and not accumulated.

    Args:
        model: On one device.
        tokens: (b, s); b·s should exceed the widest activation, because it bounds every rank.

    Returns:
        Spectra in the order of the model: for each linear its latent (low-rank families) and its
        output, and ``hidden`` before down.
    """
    spectra: list[Spectrum] = []
    with _watch(model, spectra):
        model(tokens)
    order = {name: i for i, name in enumerate(("q", "k", "v", "o", "gate", "up", "hidden", "down"))}
    return sorted(spectra, key=lambda s: (s.block, order[s.projection], s.what))


@contextmanager
def _watch(model: LlamaModel, spectra: list[Spectrum]) -> Iterator[None]:
    """Register hooks on the edges, the modules that compute a group of linears."""
    handles = []
    for number, block in model.layers.items():
        for part, groups in _GROUPS.items():
            module = getattr(block, part)
            for group, names in groups.items():
                applied = module.get_submodule(group)
                low_rank = hasattr(applied, "up")
                record = _Recorder(spectra, int(number), names, low_rank)
                last = applied.get_submodule("up" if low_rank else "product")
                handles.append(last.register_forward_hook(record.output))
                if names == ("down",):
                    first = applied.get_submodule("down" if low_rank else "product")
                    handles.append(first.register_forward_pre_hook(record.hidden))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """Computes spectra of the activations of an edge."""

    def __init__(
        self, spectra: list[Spectrum], block: int, names: Sequence[str], low_rank: bool
    ) -> None:
        self._spectra, self._block, self._names = spectra, block, names
        self._low_rank = low_rank

    def output(self, module: nn.Module, args: tuple[list[Tensor], ...], out: list[Tensor]) -> None:
        for i, name in enumerate(self._names):
            if self._low_rank:
                self._add(name, "latent", args[0][i])
            self._add(name, "output", out[i])

    def hidden(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._add("hidden", "output", args[0])

    def _add(self, name: str, what: str, activation: Tensor) -> None:
        matrix = activation.flatten(0, -2)
        spectrum = Spectrum(self._block, name, what, matrix.shape[1], energies(matrix))
        self._spectra.append(spectrum)
