# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Errors of the polar factor from Gram matrices, over condition numbers: docs/numerics.md.

    python -m scripts.research.polar_errors

M (128, 1376) has singular values from 1 down to 1 / condition, evenly spaced in their logarithms.
It is rounded to fp32 or bf16, and is then exact. Errors are spectral norms of differences:

    to the polynomial   from the same five iterations on M's singular values, in fp64
    to U Vᵀ             from the exact polar factor: what five iterations leave

"Usual" are the five iterations on M itself, in fp32. "All bf16" is the Gram form with G and Q in
bf16 too: a control.
"""

import argparse
import sys

import torch
from torch import Tensor

from scripts.bench.spectral import polar_factor, usual_polar_factor
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import markdown_table
from torchtitan_lr.optim.spectral.algebra import QUINTIC, inverse_root

SHAPE = (128, 1376)
CONDITIONS = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
DTYPES = (torch.float32, torch.bfloat16)


def matrix(condition: float, dtype: torch.dtype) -> Tensor:
    """Return M (r, n) with random singular vectors, rounded to a dtype."""
    r, n = SHAPE
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(r, r, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(n, r, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), r, dtype=torch.float64)
    return (left * values @ right.mT).to(dtype)


def all_in(dtype: torch.dtype, M: Tensor) -> Tensor:
    """Return the Gram form's result with G and Q in a dtype."""
    G = (M.to(dtype) @ M.to(dtype).mT)[None]
    return inverse_root(G)[0] @ M.to(dtype)


def errors(condition: float, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of one row of the table, by their names."""
    M = matrix(condition, dtype)
    U, values, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    expected = values / values.norm()
    for a, b, c in QUINTIC:
        expected = a * expected + b * expected**3 + c * expected**5
    polynomial, exact = U * expected @ Vh, U @ Vh
    ours, usual = polar_factor(M), usual_polar_factor(M.float())
    control = all_in(torch.bfloat16, M)

    def error(found: Tensor, wanted: Tensor) -> float:
        return torch.linalg.matrix_norm(found.double() - wanted, 2).item()

    return {
        "to the polynomial": error(ours, polynomial),
        "usual": error(usual, polynomial),
        "all bf16": error(control, polynomial),
        "to U Vᵀ": error(ours, exact),
        "usual, to U Vᵀ": error(usual, exact),
    }


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the table as Markdown; return the exit status."""
    parser = OneLineParser(prog="scripts.research.polar_errors", description=__doc__)
    options: argparse.Namespace = parser.parse_args(argv)
    del options
    cells = []
    for dtype in DTYPES:
        for condition in CONDITIONS:
            found = errors(condition, dtype)
            name = str(dtype).removeprefix("torch.")
            cells.append([f"{condition:.0e}", name, *(f"{value:.2g}" for value in found.values())])
    print(markdown_table(["condition", "M", *found], cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
