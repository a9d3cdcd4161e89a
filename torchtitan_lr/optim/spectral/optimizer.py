# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Muon, Spectron and LoRA-Muon as a torch optimizer, on plain tensors and on shards.

A step has five parts:

1. M ← βM + (1 − β)G, and N = βM + (1 − β)G in Nesterov's form, else N = M
2. the Gram matrix of each N, from a rank's own columns (`SpectralOptimizer._terms`)
3. their sum over the ranks that hold other columns
4. Q of each matrix, by its rule (`rules`): products of (r, r) alone
5. W ← (1 − ηλ) W − η Q N on a rank's own columns (`Matrix.update`)

N ranks that hold parts of the same matrices share the work of (4): each gets the sums of an equal
number of linears (reduce-scatter), and all get their Q (all-gather), which are as many bytes as one
all-reduce of the sums. Fewer than N linears are left over: every rank computes Q of these.

A matrix is seen as (r, n): r is the rank of a factor, or the shorter side of another matrix, and a
factor B (d_out, r) is transposed. Where ranks split r, they gather N before (2), and the weight if
the rule needs its Gram matrix (`Groups.gather_rows`). If they do not split n, each then has the
Gram matrix without a sum.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchtitan_lr.compat.dtensor import local_part, own_part, wrap_like
from torchtitan_lr.numerics import exact_products
from torchtitan_lr.optim.resume import copy_state
from torchtitan_lr.optim.spectral import rules
from torchtitan_lr.optim.spectral.algebra import gram, packed, spectral_norm, unpacked
from torchtitan_lr.optim.spectral.layout import Groups, Layout, Share, View
from torchtitan_lr.optim.spectral.rules import RULES, Rule

BATCH_ELEMENTS = 2**24
"""Elements of the (r, r) matrices that are iterated together: five times that is in memory."""


class Matrix(View):
    """One matrix W, seen as (r, n): r is the side on which its Gram matrix is.

    Args:
        parameter: The parameter, plain or a DTensor.
        row_dim: The dimension of the parameter that is r.
        hyper: The parameter's group: ``lr`` and ``weight_decay``, ``momentum`` and ``nesterov``.
        rule: What its Gram matrix becomes.

    Attributes:
        momentum: M, this rank's part, in fp32 or wider.
        u: The estimated left singular vector of W (r,), for rules that need the norm of W.
    """

    def __init__(self, parameter: Tensor, row_dim: int, hyper: dict[str, Any], rule: Rule) -> None:
        super().__init__(parameter, row_dim)
        self.hyper, self.rule = hyper, rule
        weight = local_part(parameter).detach()
        self.momentum = torch.zeros_like(weight, dtype=self.dtype)
        # A vector of ones may be orthogonal to the singular vector.
        drawn = torch.randn(self.r, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.u = (drawn / drawn.norm()).to(weight.device, self.dtype) if rule.weight_norms else None

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds: DTensors of a sharded matrix, no copies."""
        shape = tuple(self.parameter.shape)
        state = {self.rule.momentum: wrap_like(self.parameter, self.momentum, shape, {0: 0, 1: 1})}
        if self.u is not None:
            state["u"] = wrap_like(self.parameter, self.u, (self.r,), {})
        return state

    def accumulate(self, rejected: Tensor | None) -> Tensor:
        """Take the gradient into the momentum, and return N.

        A parameter without a gradient counts as one whose gradient is zero.

        Args:
            rejected: Whether to leave M as it is, a scalar on the device; N is then finite.
        """
        beta = float(self.hyper["momentum"])
        gradient = self.parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(self.parameter)
        G = local_part(gradient).to(self.dtype)
        if rejected is None:
            self.momentum.lerp_(G, 1 - beta)
        else:
            G = G.masked_fill(rejected, 0.0)
            weight = torch.full_like(rejected, 1 - beta, dtype=self.dtype)
            self.momentum.lerp_(G, weight.masked_fill(rejected, 0.0))
        return G.lerp(self.momentum, beta) if self.hyper["nesterov"] else self.momentum

    def update(self, Q: Tensor, u: Tensor | None, N: Tensor, rejected: Tensor | None) -> None:
        """Update this rank's part, W ← (1 − ηλ) W − η Q N, and u.

        Args:
            Q: (r, r).
            u: The next u (r,), for rules that need it.
            N: This rank's columns of N, (r, n).
            rejected: Whether to change no bit, a scalar on the device.
        """
        lr = float(self.hyper["lr"])
        kept, grown = rules.decayed(self.rule, lr, float(self.hyper["weight_decay"]))
        factor: float | Tensor = kept
        if rejected is not None:
            factor = torch.full_like(rejected, kept, dtype=self.dtype).masked_fill(rejected, 1.0)
            Q = Q.masked_fill(rejected, 0.0)
        # bf16 is rounded once; others are updated in place.
        part, weight = local_part(self.parameter), self.exact_part()
        rows = own_part(self.parameter, Q, {self.row_dim: 0})  # all, unless ranks split r
        self.oriented(weight).mul_(factor).addmm_(rows, N, alpha=-lr * grown)
        if weight is not part:
            part.copy_(weight)
        if self.u is not None and u is not None:
            self.u.copy_(u if rejected is None else torch.where(rejected, self.u, u))


Linear = tuple[Matrix, ...]
"""(A, B), or one matrix where the rule takes each alone."""


class Needs(NamedTuple):
    """What a rule needs of b matrices of one r, summed over the ranks."""

    gram: Tensor
    """N Nᵀ (b, r, r)."""
    weight_gram: Tensor
    """W Wᵀ (b, r, r); empty unless the rule needs it."""
    Wu: Tensor
    """W Wᵀu (b, r), likewise."""
    square: Tensor
    """|Wᵀu|² (b, 1), likewise."""

    @classmethod
    def of(cls, matrices: Sequence[Matrix], sums: Sequence[Tensor]) -> "Needs":
        """Read the sums of the vectors that `SpectralOptimizer._terms` makes of some matrices."""
        rule, r = matrices[0].rule, matrices[0].r
        triangle = r * (r + 1) // 2
        sizes = (triangle, triangle * rule.weight_grams, r * rule.weight_norms, rule.weight_norms)
        gram, weight_gram, Wu, square = torch.stack(list(sums)).split(sizes, dim=1)
        weight_gram = unpacked(weight_gram, r) if rule.weight_grams else weight_gram
        return cls(unpacked(gram, r), weight_gram, Wu, square)


class SpectralOptimizer(Optimizer):
    """Muon, Spectron or LoRA-Muon for the matrices of a model; it takes nothing else.

    It works with any module, in one process, under DDP, or on DTensors, FSDP2's for example:

    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 8, bias=False))
    >>> x, target = torch.randn(64, 16), torch.randn(64, 8)
    >>> A, B = model.parameters()
    >>> optimizer = SpectralOptimizer([A, B], "Spectron", pairs=[(A, B)], lr=0.05)
    >>> losses = []
    >>> for _ in range(60):
    ...     loss = nn.functional.mse_loss(model(x), target)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     losses.append(loss.item())
    >>> losses[-1] < 0.8 * losses[0]
    True

    Gradients must be summed over the data-parallel ranks, as DDP and FSDP2 do. All state is
    allocated in the constructor, in fp32 or wider. Embedding, head and vectors need another
    optimizer, such as AdamW.

    Args:
        params: Matrices, named ones or not, or groups of them as torch has them.
        rule: ``Muon``, ``Spectron`` or ``LoRAMuon``; see `rules`.
        pairs: A (r, d_in) and B (d_out, r) of every linear B A. Only Muon takes matrices that are
            in no pair.
        lr: η.
        weight_decay: λ.
        momentum: β.
        nesterov: Whether N looks ahead.

    Raises:
        ValueError: An unknown rule, a negative rate or decay, a momentum outside [0, 1), a
            parameter that is no matrix or that the rule cannot have, or a pair that is none.

    Attributes:
        matrices: All matrices.
        groups: The process groups of the messages.
        found_inf: 1 if the next step is rejected, else 0; an fp32 scalar on the device, equal on
            all ranks. None if every step counts.
    """

    found_inf: Tensor | None = None
    takes_verdict = True

    def __init__(
        self,
        params: Iterable[Any],
        rule: str = "Muon",
        pairs: Iterable[tuple[Tensor, Tensor]] = (),
        *,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = False,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}, not one of {', '.join(RULES)}")
        self.rule = RULES[rule]
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"momentum": momentum, "nesterov": nesterov})
        found: dict[Tensor, Matrix] = {}
        pairs = list(pairs)
        sides: dict[Tensor, int] = {}  # the dimension along r
        for A, B in pairs:
            sides[A], sides[B] = 0, 1
        if len(sides) < 2 * len(pairs):
            raise ValueError("a factor is in one pair")
        for group in self.param_groups:
            least = min(group["lr"], group["weight_decay"], group["momentum"])
            if least < 0 or group["momentum"] >= 1:
                given = ", ".join(f"{key} {group[key]}" for key in (*defaults, "momentum"))
                raise ValueError(
                    f"a rate and a decay are at least 0, a momentum in [0, 1), not {given}"
                )
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"{rule} takes matrices, not {tuple(parameter.shape)}")
                if parameter not in sides and self.rule.pairs_only:
                    raise ValueError(f"{rule} takes pairs of factors only")
                row_dim = sides.get(parameter, short_side(parameter))
                found[parameter] = Matrix(parameter, row_dim, group, self.rule)
        for A, B in pairs:
            if A not in found or B not in found or len(A) != B.shape[1]:
                raise ValueError("a pair is A (r, d_in) and B (d_out, r), both among the params")
        self.matrices = list(found.values())
        self.groups = Groups(matrix.layout for matrix in self.matrices)
        linears: list[Linear] = [(matrix,) for matrix in self.matrices]
        if self.rule.pairs_only:
            linears = [(found[A], found[B]) for A, B in pairs]
        self._share_out(linears)
        for parameter, matrix in found.items():
            self.state[parameter] = matrix.state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse matrices that come later: state and messages of all are made together.

        Raises:
            ValueError: The optimizer has been constructed.
        """
        if self.state:  # the constructor has made all of it
            raise ValueError("matrices cannot be added; build another optimizer of all of them")
        super().add_param_group(param_group)

    def _share_out(self, linears: Iterable[Linear]) -> None:
        """Share the linears out over the ranks that hold parts of them, alike ones evenly."""
        kinds: dict[Any, list[Linear]] = defaultdict(list)
        for linear in linears:
            splits = {(m.layout.sharing, not m.layout.columns) for m in linear}
            split, equal = splits.pop() if len(splits) == 1 else (None, True)
            kinds[split, equal, linear[0].dtype, linear[0].r].append(linear)
        self._everywhere: list[Linear] = []  # of these every rank computes Q
        by_rank: dict[Any, list[list[Linear]]] = {}
        for (split, equal, dtype, _), alike in kinds.items():
            ranks = self.groups.by_split[split].size() if split else 1
            each = len(alike) // ranks if split else 0
            self._everywhere += alike[ranks * each :]
            if each:
                lists = by_rank.setdefault((split, equal, dtype), [[] for _ in range(ranks)])
                for rank, own in enumerate(lists):
                    own += alike[rank * each : (rank + 1) * each]
        self._shares: list[tuple[list[Linear], Share[Matrix]]] = []
        for (split, equal, _), lists in by_rank.items():
            group = self.groups.by_split[split]
            matrices = [list(chain(*own)) for own in lists]
            self._shares.append((lists[group.rank()], Share(group, matrices, equal)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rejected = None if self.found_inf is None else self.found_inf > 0
        with exact_products():
            momenta = self._whole_rows({m: m.accumulate(rejected) for m in self.matrices})
            terms = self._terms(momenta)
            left = {m: (m.layout, terms[m]) for m in chain(*self._everywhere)}
            sums = self.groups.sum_terms(left)
            for matrix, Q, u in self._directions(self._everywhere, sums):
                matrix.update(Q, u, momenta[matrix], rejected)
            for own, share in self._shares:
                found = {}
                for matrix, Q, u in self._directions(own, share.reduce(terms)):
                    found[matrix] = packed(Q) if u is None else torch.cat([packed(Q), u])
                for matrix, Q, u in _unpacked(share.gather(found)):
                    matrix.update(Q, u, momenta[matrix], rejected)
        return loss

    def _whole_rows(self, parts: dict[Matrix, Tensor]) -> dict[Matrix, Tensor]:
        """Return all r rows of this rank's columns, as (r, n)."""
        asked = {matrix: (matrix.layout, part, matrix.r) for matrix, part in parts.items()}
        found = self.groups.gather_rows(asked)
        return {matrix: matrix.oriented(whole) for matrix, whole in found.items()}

    def _terms(self, momenta: dict[Matrix, Tensor]) -> dict[Matrix, Tensor]:
        """Return this rank's term of what the rule needs, in one vector for each matrix.

        Args:
            momenta: N, with all r rows.
        """
        weights: dict[Matrix, Tensor] = {}
        if self.rule.weight_grams:
            weights = self._whole_rows({m: m.exact_part() for m in self.matrices})
        steps = self._power_steps() if self.rule.weight_norms else {}
        terms: dict[Matrix, Tensor] = {}
        for batch in _batches([(matrix,) for matrix in self.matrices]):
            matrices = [matrix for (matrix,) in batch]
            vectors = [packed(torch.stack([gram(momenta[m]) for m in matrices]))]  # (b, ...)
            if self.rule.weight_grams:
                vectors.append(packed(torch.stack([gram(weights[m]) for m in matrices])))
            if self.rule.weight_norms:
                vectors.append(torch.stack([steps[m] for m in matrices]))
            terms |= zip(matrices, torch.cat(vectors, dim=1), strict=True)
        return terms

    def _power_steps(self) -> dict[Matrix, Tensor]:
        """Return a power iteration's W Wᵀu and then |Wᵀu|² (r + 1,), from a rank's own columns.

        Ranks that split r send vectors of n and of r numbers, not W.
        """
        products: dict[Matrix, tuple[Layout, Tensor]] = {}
        for m in self.matrices:
            u = own_part(m.parameter, cast(Tensor, m.u), {m.row_dim: 0})
            products[m] = m.layout, m.oriented(m.exact_part()).mT @ u
        v = self.groups.sum_terms(products, rows=True)  # Wᵀu (n,)
        parts: dict[Matrix, tuple[Layout, Tensor, int]] = {}
        for m in self.matrices:
            Wv = m.oriented(m.exact_part()) @ v[m]
            parts[m] = m.layout, Wv.unsqueeze(1 - m.row_dim), m.r
        found = self.groups.gather_rows(parts)
        return {m: torch.cat([Wv.flatten(), v[m].dot(v[m])[None]]) for m, Wv in found.items()}

    def _directions(
        self, linears: Iterable[Linear], sums: dict[Matrix, Tensor]
    ) -> Iterator[tuple[Matrix, Tensor, Tensor | None]]:
        """Yield each matrix with its Q (r, r), by the rule, and its next u (r,) if it has one.

        Args:
            linears: The linears.
            sums: What the rule needs of their matrices.
        """
        for batch in _batches(linears):
            sides = list(zip(*batch, strict=True))  # all A and all B, or all matrices
            needs = []
            for matrices in sides:
                needs.append(Needs.of(matrices, [sums[matrix] for matrix in matrices]))
            vectors: list[Sequence[Tensor | None]] = [[None] * len(batch) for _ in sides]
            if self.rule is rules.MUON:
                found = [rules.muon(needs[0].gram, max(sides[0][0].parameter.shape))]
            elif self.rule is rules.SPECTRON:
                A, B = needs
                sigma_A, u_A = spectral_norm(A.Wu, A.square[:, 0])
                sigma_B, u_B = spectral_norm(B.Wu, B.square[:, 0])
                found = [*rules.spectron(A.gram, B.gram, sigma_A, sigma_B)]
                vectors = [u_A.unbind(), u_B.unbind()]
            else:
                A, B = needs
                found = [*rules.lora_muon(A.gram, B.gram, A.weight_gram, B.weight_gram)]
            for matrices, Q, u in zip(sides, found, vectors, strict=True):
                yield from zip(matrices, Q, u, strict=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state into the existing tensors; the hyperparameters stay the configured ones."""
        copy_state(self, state_dict)


def short_side(matrix: Tensor) -> int:
    """Return the shorter dimension of a matrix; of a square, the second if the first is split."""
    m, n = matrix.shape
    if m != n:
        return 0 if m < n else 1
    return 1 if Layout.of(matrix, 0).rows else 0


def _batches(linears: Iterable[Linear]) -> Iterator[list[Linear]]:
    """Yield linears whose (r, r) matrices are iterated together: those of equal shapes."""
    alike: dict[Any, list[Linear]] = defaultdict(list)
    for linear in linears:
        first = linear[0]
        alike[first.r, max(first.parameter.shape), first.dtype].append(linear)
    for (r, *_), same in alike.items():
        size = max(1, BATCH_ELEMENTS // r**2)
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _unpacked(
    vectors: dict[Matrix, Tensor],
) -> Iterator[tuple[Matrix, Tensor, Tensor | None]]:
    """Yield each matrix with its Q (r, r) and its u (r,), from the upper triangle of Q, and u."""
    for batch in _batches([(matrix,) for matrix in vectors]):
        r = batch[0][0].r
        rows = torch.stack([vectors[matrix] for (matrix,) in batch])  # (b, ...)
        triangles, u = rows.split((r * (r + 1) // 2, rows.shape[1] - r * (r + 1) // 2), dim=1)
        for (matrix,), Q, vector in zip(batch, unpacked(triangles, r), u, strict=True):
            yield matrix, Q, vector if len(vector) else None
