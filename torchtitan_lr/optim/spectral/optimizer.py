# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon, Spectron and LoRA-Muon as a torch optimizer, on plain tensors and on shards.

In one process a step of a matrix W (m, n) is that of Muon (Jordan et al., 2024):

    M ← βM + (1 − β)G            N = βM + (1 − β)G in Nesterov's form, else N = M
    Q ← (N Nᵀ)^(-1/2), or what the rule makes of N Nᵀ (`rules`): products of (r, r) alone
    W ← (1 − ηλ) W − η Q N

`SpectralOptimizer.update` has these lines for all matrices. A matrix is seen as (r, n): r is the
rank of a factor, or the shorter side of another matrix, and a factor B (d_out, r) is transposed.
Ranks that split n have terms of N Nᵀ, and sum them. Ranks that split r gather N before, and the
weight if the rule needs its Gram matrix (`GramGroups.gather_rows`). The ranks that hold parts of
the same matrices divide the work on Q (`Division`). `costs.gram_messages` states all messages.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lr.compat.dispatch import between
from torchtitan_lr.compat.dtensor import local_part, own_part, wrap_like
from torchtitan_lr.numerics import add_product, exact_products, rounded_once, sides
from torchtitan_lr.optim.own_optimizer import OwnOptimizer, alike, split_buckets
from torchtitan_lr.optim.spectral.layout import Division, GramGroups, Split, View, batches
from torchtitan_lr.optim.spectral.rules import RULES, Rule, gram, packed, unpacked

LAUNCH_ELEMENTS = 2**24
"""Elements of the momenta, or weights, that one kernel changes: a copy of them is in memory."""


class SpectralWeight(View):
    """A matrix W with its state."""

    def __init__(self, parameter: Tensor, row_dim: int, hyper: dict[str, Any], rule: Rule) -> None:
        super().__init__(parameter, row_dim)
        # Its parameter group: ``lr`` and ``weight_decay``, ``momentum`` and ``nesterov``.
        self.hyper, self.rule = hyper, rule
        weight = local_part(parameter).detach()
        self.momentum = torch.zeros_like(weight, dtype=self.dtype)  # M, this rank's part
        # The estimated left singular vector of W (r,), for rules that need the norm of W. A vector
        # of ones may be orthogonal to it.
        drawn = torch.randn(self.r, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.u = (drawn / drawn.norm()).to(weight.device, self.dtype) if rule.weight_norms else None

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: DTensors of a sharded matrix, no copies."""
        shape = tuple(self.parameter.shape)
        state = {self.rule.momentum: wrap_like(self.parameter, self.momentum, shape, {0: 0, 1: 1})}
        if self.u is not None:
            state["u"] = wrap_like(self.parameter, self.u, (self.r,), {})
        return state

    def gradient(self, rejected: Tensor) -> Tensor:
        """Return this rank's part of the gradient, in M's dtype; zero if there is none.

        Of a rejected step (a scalar on the device) return M: it then stays as it is, and N finite.
        """
        gradient = self.parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(self.parameter)
        return torch.where(rejected, self.momentum, local_part(gradient))


Linear = tuple[SpectralWeight, ...]
"""(A, B), or one matrix where the rule takes each alone."""

Vectors = Mapping[SpectralWeight, Tensor]
"""A vector of each matrix: what the rule needs, or Q's upper triangle with the next u behind it."""


class SpectralOptimizer(OwnOptimizer):
    """Muon, Spectron or LoRA-Muon for the matrices of a model; it takes nothing else.

    It works with any module, in one process, under DDP, or on DTensors, FSDP2's for example:

    >>> A, B = (torch.nn.Linear(n, m, bias=False) for n, m in ((16, 4), (4, 8)))
    >>> pairs = [(A.weight, B.weight)]
    >>> optimizer = SpectralOptimizer([A.weight, B.weight], "Spectron", pairs, lr=0.05)
    >>> B(A(torch.ones(1, 16))).square().sum().backward()
    >>> optimizer.step()

    Gradients must be summed over the data-parallel ranks, as DDP and FSDP2 do. Embedding, head and
    vectors need another optimizer, such as AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],  # matrices, named ones or not, or torch's parameter groups of them
        rule: str = "Muon",  # one of `rules.RULES`
        # A (r, d_in) and B (d_out, r) of every linear B A; of the rules Muon alone takes others.
        pairs: Iterable[tuple[Tensor, Tensor]] = (),
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = False,  # whether N looks ahead
    ) -> None:
        self.rule, pairs = RULES[rule], list(pairs)
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"momentum": momentum, "nesterov": nesterov})
        sides = {A: 0 for A, _ in pairs} | {B: 1 for _, B in pairs}  # the dimension along r
        found: dict[Tensor, SpectralWeight] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in sides and self.rule.pairs_only:
                    raise ValueError(f"{rule} takes pairs of factors only")
                row_dim = sides.get(parameter, short_side(parameter))
                found[parameter] = SpectralWeight(parameter, row_dim, group, self.rule)
        self.matrices = list(found.values())
        self.groups = GramGroups(self.matrices)
        linears: list[Linear] = [(matrix,) for matrix in self.matrices]
        if self.rule.pairs_only:
            linears = [(found[A], found[B]) for A, B in pairs]
        self._divide(linears)
        for parameter, matrix in found.items():
            self.state[parameter] = matrix.state()

    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups of its messages by the names of their mesh dimensions."""
        return self.groups.by_name()

    def _divide(self, linears: Iterable[Linear]) -> None:
        """Divide the work on Q among the ranks that hold parts of the same linears."""
        self._left: list[Linear] = []  # every rank computes Q of these
        divisions: dict[Any, Division[SpectralWeight]] = {}  # each has messages of its own
        for same in alike(
            linears, lambda linear: (_split_of(linear), linear[0].dtype, linear[0].r)
        ):
            split, summed = _split_of(same[0])
            if split is None:
                self._left += same
                continue
            key = split, summed, same[0][0].dtype
            division = divisions.setdefault(key, Division(self.groups.by_split[split], summed))
            self._left += division.deal(same)
        self._divisions = [division for division in divisions.values() if division.own]

    def update(self, rejected: Tensor) -> None:
        """Update all matrices, unless the step is rejected."""
        with exact_products(split=self.rule.splits and may_round(rejected.device)):
            N = self.groups.gather_rows(self._accumulate(rejected))  # (r, n), a rank's own columns
            terms = self._terms(N)  # of N Nᵀ, and of what else the rule needs
            # Every rank computes Q of the linears left over.
            left = self.groups.sum_terms({m: terms[m] for m in chain(*self._left)})
            for found in self._directions(self._left, left):
                self._change(found, N, rejected)
            # Of the others each rank computes some.
            for division in self._divisions:
                own: dict[SpectralWeight, Tensor] = {}
                for found in self._directions(division.own, division.reduce(terms)):
                    own |= found
                self._change(division.gather(own), N, rejected)

    def _accumulate(self, rejected: Tensor) -> dict[SpectralWeight, Tensor]:
        """Take the gradients into the momenta, and return this rank's part of each N."""
        found: dict[SpectralWeight, Tensor] = {}
        for hyper, matrices in _launches(self.matrices):
            beta = float(hyper["momentum"])
            M = [matrix.momentum for matrix in matrices]
            G = [matrix.gradient(rejected) for matrix in matrices]
            torch._foreach_lerp_(M, G, 1 - beta)
            N = between(G, M, beta) if hyper["nesterov"] else M
            found |= zip(matrices, N, strict=True)
        return found

    def _terms(self, momenta: Vectors) -> dict[SpectralWeight, Tensor]:
        """Return this rank's term of what the rule needs, in one vector for each matrix."""
        weights: Vectors = {}
        if self.rule.weight_grams:
            weights = self.groups.gather_rows({m: m.exact_part() for m in self.matrices})
        steps = self._power_steps() if self.rule.weight_norms else {}
        terms: dict[SpectralWeight, Tensor] = {}
        for matrices in batches(self.matrices):
            vectors = [packed(torch.stack([gram(momenta[m]) for m in matrices]))]  # (b, ...)
            if self.rule.weight_grams:
                vectors.append(packed(torch.stack([gram(weights[m]) for m in matrices])))
            if self.rule.weight_norms:
                Wu, squares = zip(*(steps[m] for m in matrices), strict=True)
                vectors += [torch.stack(Wu), torch.stack(squares)[:, None]]
            terms |= zip(matrices, torch.cat(vectors, dim=1), strict=True)
        return terms

    def _power_steps(self) -> dict[SpectralWeight, tuple[Tensor, Tensor]]:
        """Return a power iteration's W Wᵀu (r,) and |Wᵀu|², from a rank's own columns.

        Ranks that split r send vectors of n and of r numbers, not W.
        """
        u = {m: own_part(m.parameter, cast(Tensor, m.u), {m.row_dim: 0}) for m in self.matrices}
        v = self.groups.sum_terms(self._times(u, transposed=True), over_rows=True)  # Wᵀu (n,)
        products = {m: Wv.unsqueeze(1 - m.row_dim) for m, Wv in self._times(v).items()}
        found = self.groups.gather_rows(products)
        return {m: (Wv.flatten(), v[m].dot(v[m])) for m, Wv in found.items()}

    def _times(self, vectors: Vectors, transposed: bool = False) -> Vectors:
        """Return this rank's terms of W x (r,), or Wᵀ x (n,), of a vector of each matrix."""
        found: dict[SpectralWeight, Tensor] = {}
        for _, bucket in _launches(self.matrices):
            for same in alike(bucket, lambda m: (m.row_dim, m.momentum.shape)):
                W, x = [m.exact_part() for m in same], [vectors[m] for m in same]
                flipped = transposed == (same[0].row_dim == 0)
                if x[0].device.type == "cpu":  # it would add a stack's products in another order
                    for m, w, v in zip(same, W, x, strict=True):
                        found[m] = (w.mT if flipped else w) @ v
                    continue
                stack = torch.stack(W).mT if flipped else torch.stack(W)
                found |= zip(same, (stack @ torch.stack(x)[..., None])[..., 0], strict=True)
        # In one order on all ranks: messages are joined in it, and shapes are alike on some alone.
        return {m: found[m] for m in self.matrices}

    def _directions(self, linears: Iterable[Linear], sums: Vectors) -> Iterator[Vectors]:
        """Yield Q's upper triangle, and the next u of a rule that needs it, of matrices."""
        by_first = {linear[0]: linear for linear in linears}
        for batch in batches(by_first):
            sides = list(zip(*(by_first[first] for first in batch), strict=True))  # all A and all B
            needs = []
            for matrices in sides:
                rows = torch.stack([sums[matrix] for matrix in matrices])
                needs.append(self.rule.needs(rows, batch[0].r))
            directions = self.rule.directions(needs, max(batch[0].parameter.shape))
            for matrices, (Q, u) in zip(sides, directions, strict=True):
                rows = packed(Q) if u is None else torch.cat([packed(Q), u], dim=1)
                yield dict(zip(matrices, rows, strict=True))

    def _change(self, directions: Vectors, momenta: Vectors, rejected: Tensor) -> None:
        """Update this rank's part of matrices, W ← (1 − ηλ) W − η Q N, and their u.

        A rejected step (a scalar on the device) changes no bit.
        """
        for matrices in batches(directions):
            r = matrices[0].r
            rows = torch.stack([directions[matrix] for matrix in matrices])  # (b, ...)
            if self.rule.weight_norms:
                own = [cast(Tensor, matrix.u) for matrix in matrices]
                u = torch.where(rejected, torch.stack(own), rows[:, -r:])
                torch._foreach_copy_(own, list(u.unbind()))
            Q = unpacked(rows[:, : r * (r + 1) // 2], r).masked_fill(rejected, 0.0)  # (b, r, r)
            Q_of = dict(zip(matrices, Q, strict=True))
            for hyper, same in _launches(matrices):
                lr, dtype = float(hyper["lr"]), same[0].dtype
                kept, grown = self.rule.decayed(lr, float(hyper["weight_decay"]))
                factor = torch.full_like(rejected, kept, dtype=dtype).masked_fill(rejected, 1.0)
                with rounded_once([local_part(m.parameter) for m in same]) as weights:
                    torch._foreach_mul_(weights, factor)
                    for m, weight in zip(same, weights, strict=True):
                        # All rows, unless ranks split r.
                        part = own_part(m.parameter, Q_of[m], {m.row_dim: 0})
                        left, right = sides(part)[0], sides(momenta[m].mT)[1]
                        add_product(m.oriented(weight), left, right, alpha=-lr * grown)


def may_round(device: torch.device) -> bool:
    """Return whether the run allows products of fp32 matrices to be rounded on a GPU."""
    return device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"


def short_side(matrix: Tensor) -> int:
    """Return the shorter dimension of a matrix; of a square, the second if the first is split."""
    m, n = matrix.shape
    if m != n:
        return 0 if m < n else 1
    return 1 if View(matrix, 0).row_split is not None else 0


def _split_of(linear: Linear) -> tuple[Split | None, bool]:
    """Return the ranks that hold parts of a linear, and whether each has its sums without a sum.

    None if they are not the same ones for both factors.
    """
    found = {(m.column_split or m.row_split, m.column_split is None) for m in linear}
    return found.pop() if len(found) == 1 else (None, True)


def _launches(
    matrices: Iterable[SpectralWeight],
) -> Iterator[tuple[dict[str, Any], list[SpectralWeight]]]:
    """Yield matrices of one parameter group and dtype, which one kernel changes, with the group."""
    for same in alike(matrices, lambda matrix: (id(matrix.hyper), matrix.dtype)):
        sizes = [matrix.momentum.numel() for matrix in same]
        for bucket in split_buckets(same, sizes, LAUNCH_ELEMENTS):
            yield same[0].hyper, bucket
