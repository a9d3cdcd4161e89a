# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""The time of an optimizer's step for the factors of a CoLA model, on a CPU.

    python -m scripts.bench.spectral --flavors 60M 130M --turns 5 --out outputs/spectral.json

Each optimizer steps the same factors (those of the blocks) with gradients that stay. They take
turns; a ratio is the median over the turns of its time over that of the usual form in fp32:

    usual, fp32       Muon by the usual five iterations, on the momentum itself
    AdamW             torch's, foreach
    torch.optim.Muon  torch's, whose products are in bf16
    Muon, Spectron, LoRAMuon   ours, in fp32: from Gram matrices

--layers takes fewer blocks than the flavor has: every time is proportional to their number.

Exit status: 0; 1 a ratio of Muon is above its goal (0.65 at 60M, 0.75 at 130M); 2 invalid
arguments.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.harness import in_turns, machine
from torchtitan_lr.commands.parser import OneLineParser, check_at_least, in_one_line
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.optim.spectral.algebra import QUINTIC, gram, inverse_root
from torchtitan_lr.optim.spectral.optimizer import SpectralOptimizer
from torchtitan_lr.optim.spectral.selection import select_matrices

GOALS = {"60M": 0.65, "130M": 0.75}
"""Largest ratio of Muon's step to the usual form's; the products alone: 0.47 and 0.55."""

USUAL = "usual, fp32"


def polar_factor(M: Tensor) -> Tensor:
    """Return the polar factor of M (r, n) from its Gram matrix, in fp32 or wider; 0 for 0."""
    Q = inverse_root(gram(M)[None])[0]
    return Q @ M.to(Q.dtype)


def usual_polar_factor(M: Tensor) -> Tensor:
    """Return what Muon's five iterations on M itself make of it, in M's dtype.

    Args:
        M: (m, n); the iterations run on the wide one of M and its transpose.
    """
    X = M.mT if M.shape[0] > M.shape[1] else M  # (r, n)
    X = X / X.norm()
    for a, b, c in QUINTIC:
        G = X @ X.mT  # (r, r)
        X = a * X + (b * G + c * G @ G) @ X
    return X.mT if M.shape[0] > M.shape[1] else X


class UsualMuon(torch.optim.Optimizer):
    """Muon with Moonlight's scale, by `usual_polar_factor`: what ours is measured against."""

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices, one after the other."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = usual_polar_factor(state["momentum"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


Factors = dict[str, nn.Parameter]


def factors_of(flavor: str, layers: int, device: str) -> tuple[Factors, list[tuple[str, str]]]:
    """Return the factors of a CoLA model's blocks with random gradients, and the names of pairs.

    Args:
        flavor: The size.
        layers: Number of blocks; 0 for the flavor's.
        device: Where they are drawn.
    """
    args = FLAVORS["cola"][flavor]
    shapes = model_shapes(replace(args, n_layers=layers or args.n_layers))
    chosen = select_matrices(shapes, "factors")
    factors = {}
    for name in sorted(chosen.names):
        factors[name] = nn.Parameter(torch.randn(shapes[name], device=device) * 0.02)
        factors[name].grad = torch.randn(shapes[name], device=device) * 1e-3
    return factors, list(chosen.pairs)


def our_optimizer(
    rule: str, factors: Factors, pairs: Sequence[tuple[str, str]]
) -> SpectralOptimizer:
    """Build one of our optimizers for the factors."""
    linears = [(factors[a], factors[b]) for a, b in pairs]
    return SpectralOptimizer([*factors.values()], rule, linears, lr=1e-4)


def optimizers(flavor: str, layers: int) -> dict[str, Callable[[], object]]:
    """Return the steps of all optimizers by name, each with factors of its own."""

    def drawn() -> list[nn.Parameter]:
        return [*factors_of(flavor, layers, "cpu")[0].values()]

    steps: dict[str, Callable[[], object]] = {
        USUAL: UsualMuon(drawn(), lr=1e-4).step,
        "AdamW": torch.optim.AdamW(drawn(), lr=1e-4, foreach=True).step,
        "torch.optim.Muon": torch.optim.Muon(drawn(), lr=1e-4).step,
    }
    for rule in ("Muon", "Spectron", "LoRAMuon"):
        steps[rule] = our_optimizer(rule, *factors_of(flavor, layers, "cpu")).step
    return steps


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Time the optimizers, print a table and write JSON; return the exit status."""
    parser = OneLineParser(prog="scripts.bench.spectral", description=__doc__)
    known = sorted(FLAVORS["cola"])
    parser.add_argument("--flavors", nargs="+", choices=known, default=[*GOALS], help="sizes")
    parser.add_argument("--layers", type=int, default=0, help="blocks; 0 for the flavor's")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each")
    parser.add_argument("--out", type=Path, help="JSON file to write as well")
    options: argparse.Namespace = parser.parse_args(argv)
    check_at_least(options, layers=0, turns=1)
    torch.manual_seed(0)
    report: dict[str, Any] = {"machine": machine(), "layers": options.layers, "steps": {}}
    cells, missed = [], False
    for flavor in options.flavors:
        timed = in_turns(optimizers(flavor, options.layers), options.turns, warmup=1)
        rows = report["steps"][flavor] = {name: t.as_dict() for name, t in timed.items()}
        for name, row in rows.items():
            row["ratio"] = 1 / row.pop("speed_up")
            low, high = row["quartiles"] = sorted(1 / end for end in row["quartiles"])
            ratio = f"{row['ratio']:.2f} ({low:.2f}-{high:.2f})"
            cells.append([flavor, name, f"{row['ms']:.1f}", ratio])
        missed = missed or rows["Muon"]["ratio"] > GOALS.get(flavor, 1.0)
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(text_table(["flavor", "optimizer", "ms", f"over {USUAL}"], cells))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
