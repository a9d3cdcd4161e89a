# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""An optimizer from outside the package: SOAP for factors (Vyas et al., arXiv 2409.11321).

A factor W and its gradient G are seen as (r, n). SOAP is Adam in the eigenbasis Q of an average of
G Gᵀ (r, r). Here only the side of r has one, and ranks that split n send nothing else:

    L ← β₂ L + (1 − β₂) Σ G Gᵀ    summed over the ranks that split n, fsdp and tp together
    Q ← the eigenvectors of L     every K steps, by every rank for itself
    M ← β₁ M + (1 − β₁) G,  V ← β₂ V + (1 − β₂) (Qᵀ G)²
    W ← (1 − ηλ) W − η Q (Qᵀ M̂ / (√V̂ + ε))

AdamW updates the other parameters. A run names this module by ``experimental.custom_import``.
"""

from functools import partial
from math import prod

import torch

from torchtitan_lr.compat.dtensor import local_part, wrap_like
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.kernels import Work
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.optimizer_costs import MatrixCost
from torchtitan_lr.errors import require
from torchtitan_lr.optim.containers import beside_adamw
from torchtitan_lr.optim.entries import OptimizerEntry, register_optimizer
from torchtitan_lr.optim.spectral.layout import GramGroups, View
from torchtitan_lr.optim.spectral.rules import gram, packed, unpacked

EVERY = 2
"""K."""


class Factor(View):
    """A factor with its state; all of it exists from the start, so that a checkpoint loads."""

    def __init__(self, parameter, row_dim, hyper):
        super().__init__(parameter, row_dim)
        self.hyper = hyper
        part = local_part(parameter).detach()
        self.M, self.V = (torch.zeros_like(part, dtype=self.dtype) for _ in range(2))
        self.L = torch.zeros(self.r, self.r, dtype=self.dtype, device=part.device)
        self.Q = torch.eye(self.r, dtype=self.dtype, device=part.device)

    def state(self):
        shape, both = tuple(self.parameter.shape), {0: 0, 1: 1}
        wrap = partial(wrap_like, self.parameter)
        moments = {"soap_M": wrap(self.M, shape, both), "soap_V": wrap(self.V, shape, both)}
        square = (self.r, self.r)
        return moments | {"L": wrap(self.L, square, {}), "Q": wrap(self.Q, square, {})}


class SOAP(torch.optim.Optimizer):
    def __init__(self, groups, pairs, betas, eps):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.betas, self.eps = betas, eps
        of_B = {B for _, B in pairs}
        self.factors = []
        for group in self.param_groups:
            for parameter in group["params"]:
                self.factors.append(Factor(parameter, int(parameter in of_B), group))
        self.groups = GramGroups(self.factors)
        self.steps = torch.zeros(())
        for factor in self.factors:
            self.state[factor.parameter] = factor.state() | {"step": self.steps}

    def named_groups(self):
        return self.groups.by_name()

    @torch.no_grad()
    def step(self, closure=None):
        gradients, terms = {}, {}
        for factor in self.factors:
            G = factor.oriented(local_part(factor.parameter.grad).to(factor.dtype))  # (r, n/N)
            gradients[factor], terms[factor] = G, packed(gram(G))
        changes = int(self.steps) % EVERY == 0
        self.steps += 1
        for factor, triangle in self.groups.sum_terms(terms).items():
            (total,) = unpacked(triangle[None], factor.r)
            factor.L.lerp_(total, 1 - self.betas[1])
            if changes:
                factor.Q.copy_(torch.linalg.eigh(factor.L).eigenvectors)
            self._update(factor, gradients[factor])

    def _update(self, factor, G):
        beta1, beta2 = self.betas
        Q, M, V = factor.Q, factor.oriented(factor.M), factor.oriented(factor.V)  # M, V (r, n/N)
        M.lerp_(G, 1 - beta1)
        V.lerp_((Q.mT @ G).square(), 1 - beta2)
        mean, square = (m / (1 - b ** int(self.steps)) for m, b in ((M, beta1), (V, beta2)))
        direction = Q @ ((Q.mT @ mean) / (square.sqrt() + self.eps))
        lr, decay = factor.hyper["lr"], factor.hyper["weight_decay"]
        weight = factor.oriented(local_part(factor.parameter))
        weight.mul_(1 - lr * decay).sub_(lr * direction.to(weight.dtype))


def build(model_parts, config, parallel_dims):
    options = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return beside_adamw(model_parts, config, lambda groups, pairs: SOAP(groups, pairs, **options))


class SoapCost(MatrixCost):
    """Triangles of G Gᵀ are summed; M and V follow the factor, L and Q are on every rank."""

    def traffic(self, pp_rank):
        found = {}
        for matrix in self.matrices(pp_rank):
            if matrix.columns:
                numbers = matrix.r * (matrix.r + 1) // 2
                found[matrix.columns] = found.get(matrix.columns, 0) + numbers
        rows = [("optimizer", "optimizer", "all_reduce", "gram", 1, n) for n in found.values()]
        return [Traffic(*row, "_".join(dims)) for row, dims in zip(rows, found, strict=True)]

    def state_bytes(self, pieces):
        own, others = self.own(pieces)
        numbers = sum(2 * prod(piece) + 2 * self.whole[name].r ** 2 for name, piece in own.items())
        count = 4 * bool(own)  # of steps, which the factors share
        return self.wide * numbers + count + super().state_bytes(others)

    def work(self, pp_rank):
        """G Gᵀ, Qᵀ G, Qᵀ M and Q D; the eigenvectors are left out."""
        own, others = self.own(self.run.pieces_of(pp_rank))
        matrices, ranks = self.matrices(pp_rank), self.run.ranks
        flops = sum(4 * 2 * m.r**2 * m.local_columns(ranks) for m in matrices)
        passes = 12 * self.wide * sum(a * b for a, b in own.values())
        traffic = passes + self.adamw_traffic(others)
        return Work({(flops, 0.0): 1}, traffic=traffic, kernels=4 * len(matrices))


def check(config, world_size, device_type):
    """Refuse ranks that split r: none has all rows of G then."""
    run = read_run(config, world_size)
    for stage in range(run.pp):
        split = [matrix for matrix in run.optimizer.matrices(stage) if matrix.rows]
        want = "'btp' with widths that the ranks divide: FactorSOAP needs whole r"
        require(not split, "parallelism.tp_plan", config.parallelism.tp_plan, want)


register_optimizer(
    OptimizerEntry(
        "FactorSOAP",
        build,
        cost=SoapCost,
        updates="factors",
        splits_columns=True,
        sends_state=True,
        reads_groups=True,
        defaults={"optimizer.lr": 3e-3},
        check=check,
    )
)
