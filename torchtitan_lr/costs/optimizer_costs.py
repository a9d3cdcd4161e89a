# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What an optimizer sends, holds and computes in a step of a described run, on paper.

`OptimizerCost` is AdamW's; an optimizer's entry (`optim.entries`) names its subclass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import TYPE_CHECKING, TypeVar

from torchtitan_lr.costs.gram_messages import (
    RULES,
    Rule,
    SpectralMatrix,
    spectral_flops,
    spectral_traffic,
)
from torchtitan_lr.costs.kernels import Work
from torchtitan_lr.costs.messages import Traffic, mean_of, sent_bytes
from torchtitan_lr.costs.tsr_messages import TSRMatrix, tsr_traffic
from torchtitan_lr.errors import require
from torchtitan_lr.ledger.ledger import OUTER
from torchtitan_lr.optim.outer import coded_bytes, layer_fragments, message_entries
from torchtitan_lr.optim.spectral.matrices import select_matrices
from torchtitan_lr.optim.tsr.selection import MatrixPlan, TSRSettings, plan_matrices

if TYPE_CHECKING:
    from torchtitan_lr.costs.described_run import Run

Shape = tuple[int, ...]
NamedShapes = Mapping[str, Shape]
Side = TypeVar("Side")

MOMENTS = 2  # of AdamW and TSR-Adam, numbers per number
STEP_BYTES = 4  # of a step counter, an fp32 scalar: AdamW's of each tensor, TSR-Adam's of a rank
COUNTER_BYTES = 8  # of an int64 counter: TSR-Adam counts the refreshes of each matrix

ADAMW_PASSES = 10
"""Passes over a rank's parameters in a step of fused AdamW: clipping reads the gradients twice and
writes them once; Adam reads weight, gradient and both moments and writes all but the gradient."""

TSR_PASSES = 5
"""Passes over a compressed matrix in a step of TSR-Adam without a refresh: the projection reads the
gradient; the decay and the lift each read the weight and write it."""

TSR_KERNELS = 4  # its products: two to project a gradient, and two to lift a core


class OptimizerCost:
    """AdamW's: no messages, and two moments of every parameter."""

    steps_alike = True  # whether a step's passes are those of any other

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def wide(self) -> int:
        """Bytes of an element of a state that is fp32 or wider."""
        return max(4, self.run.precision.parameter)

    def traffic(self, pp_rank: int) -> list[Traffic]:
        """Return what a rank sends in an ordinary step: rows of the pass ``optimizer``."""
        return []

    def mean_traffic(self, pp_rank: int) -> list[Traffic]:
        """Return what it sends in an average step."""
        return self.traffic(pp_rank)

    def kinds_of_steps(self, pp_rank: int) -> dict[str, list[Traffic]]:
        """Return what it sends by the kind of step; nothing if all steps are alike."""
        return {}

    def state_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of the states of a rank's pieces of parameters."""
        size = MOMENTS * self.run.precision.parameter
        return sum(STEP_BYTES + size * prod(piece) for piece in pieces.values())

    def buffer_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes that it holds besides the states."""
        return 0

    def work(self, pp_rank: int) -> Work:
        """Return what a rank computes in an ordinary step, in fp32; kernels are those per matrix.

        Those on lists and batches take no time of their own, nor do the bytes of products.
        """
        return Work(traffic=self.adamw_traffic(self.run.pieces_of(pp_rank)))

    def adamw_traffic(self, pieces: NamedShapes) -> float:
        """Return the bytes that AdamW reads and writes."""
        return ADAMW_PASSES * self.run.precision.parameter * sum(map(prod, pieces.values()))

    def model_flops(self) -> float:
        """Return the FLOPs of products that grow with the model alone, each once."""
        return 0.0


class OuterCost:
    """What outer steps send and hold beside the optimizer inside: nothing if there are none."""

    def __init__(self, run: Run) -> None:
        self.run, self.section = run, run.config.outer
        self.every = 0 if run.baseline else self.section.every
        self.rounds = self.section.bits < 32
        # What is held of each parameter: common weights, momentum and a residual.
        self.copies = 2 + (self.rounds and self.section.feedback) if self.every else 0

    def _fragments(self, pieces: NamedShapes) -> list[int]:
        """Return the numbers in a message of each fragment that a rank has a part of."""
        fragments = layer_fragments(pieces, self.run.args.n_layers, self.section.fragments)
        sizes = Counter[int]()
        for name, piece in pieces.items():
            sizes[fragments[name]] += message_entries(prod(piece), self.section.bits)
        return [*sizes.values()]

    def exchanges(self, pp_rank: int) -> list[Traffic]:
        """Return what a rank sends for each fragment that it has a part of."""
        pieces = self.run.pieces_of(pp_rank) if self.every and self.run.replicas > 1 else {}
        op, role, rows = "all_reduce", "outer", []
        for entries in self._fragments(pieces):
            if self.rounds:
                op, role = "all_gather", "index"
                entries = self.run.replicas * coded_bytes(entries, self.section.bits)
            rows.append(Traffic(OUTER, "optimizer", op, role, 1, entries, "dp_replicate"))
        return rows

    def mean_traffic(self, pp_rank: int) -> list[Traffic]:
        """Return what it sends in an average step, rounded."""
        return mean_of(self.exchanges(pp_rank), self.every)

    def kinds_of_steps(self, pp_rank: int) -> dict[str, list[Traffic]]:
        """Return what steps without and with an exchange of a fragment send, and average ones."""
        rows, ordinary = self.exchanges(pp_rank), self.run.optimizer.traffic(pp_rank)
        if not rows:
            return {}
        exchange = [*ordinary, max(rows, key=lambda row: row.elements)]
        mean = self.run.optimizer.mean_traffic(pp_rank) + self.mean_traffic(pp_rank)
        return {"ordinary": ordinary, "exchange": exchange, "average": mean}

    def state_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of common weights, momentum and residual of a rank's pieces."""
        return self.copies * self.run.precision.parameter * sum(map(prod, pieces.values()))

    def exchange_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of an exchange of all fragments, as after a last step."""
        entries, size = sum(self._fragments(pieces)), self.run.precision.parameter
        if not self.rounds:
            return 2 * size * entries  # changes by parameter, and together
        # The sum, its own message in fp32, and of one that is decoded bytes and fp32.
        numbers = (1 + self.section.overlap) * size + 2 * 4 + 1
        return numbers * entries + (1 + self.run.replicas) * coded_bytes(entries, self.section.bits)

    def travelling_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of copied weights and of messages that travel during a step, if any."""
        if not (self.every and self.section.overlap):
            return 0
        entries, size = max(self._fragments(pieces)), self.run.precision.parameter
        messages = (1 + self.run.replicas) * coded_bytes(entries, self.section.bits)
        return size * entries + (messages if self.rounds else size * entries)


class MatrixCost(OptimizerCost):
    """Of an optimizer of matrices (r, n), which sends sums of (r, r); AdamW updates the rest."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        chosen = select_matrices(run.global_shapes, run.entry.updates).names
        # Of the model, in its order; nothing splits them.
        self.whole: dict[str, SpectralMatrix] = {}
        for name, shape in run.global_shapes.items():
            if name in chosen:
                self.whole[name] = SpectralMatrix.of(name, shape, ((), ()))

    def matrices(self, pp_rank: int) -> list[SpectralMatrix]:
        """Return a rank's matrices and their splits, in the model's order."""
        run, pieces = self.run, self.run.pieces_of(pp_rank)
        return [
            SpectralMatrix.of(name, run.global_shapes[name], run.splits(name))
            for name in self.whole
            if name in pieces  # else another pipeline rank has it
        ]

    def own(self, pieces: NamedShapes) -> tuple[NamedShapes, NamedShapes]:
        """Divide pieces into those of matrices and those of AdamW."""
        own = {name: piece for name, piece in pieces.items() if name in self.whole}
        return own, {name: piece for name, piece in pieces.items() if name not in own}


class SpectralCost(MatrixCost):
    """Muon, Spectron and LoRA-Muon: a momentum, fp32 or wider, and Spectron's vector (r,)."""

    @property
    def rule(self) -> Rule:
        """What the optimizer, or the one that it is like, needs of a matrix."""
        want = f"another ``cost`` in its entry, or ``like``: one of {', '.join(RULES)}"
        require(self.run.entry.like in RULES, "optimizer.name", self.run.entry.name, want)
        return RULES[self.run.entry.like]

    def traffic(self, pp_rank: int) -> list[Traffic]:
        """Return sums of Gram matrices, and what is gathered for them."""
        return spectral_traffic(self.rule, self.matrices(pp_rank), self.run.ranks)

    def state_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of momenta and vectors, and of AdamW's moments."""
        own, others = self.own(pieces)
        numbers = sum(map(prod, own.values()))
        numbers += self.rule.vectors * sum(self.whole[name].r for name in own)
        return self.wide * numbers + super().state_bytes(others)

    def work(self, pp_rank: int) -> Work:
        """Return products of momenta and of (r, r) matrices, and passes over matrices."""
        own, others = self.own(self.run.pieces_of(pp_rank))
        passes = self.rule.passes * self.wide * sum(map(prod, own.values()))
        matrices = self.matrices(pp_rank)
        flops = spectral_flops(self.rule, matrices, self.run.ranks)
        kernels = self.rule.kernels * len(matrices)
        traffic = passes + self.adamw_traffic(others)
        return Work({(flops, 0.0): 1}, traffic=traffic, kernels=kernels)

    def model_flops(self) -> float:
        """Return the FLOPs of all products of a step, each once."""
        return spectral_flops(self.rule, [*self.whole.values()], {})


class TSRCost(OptimizerCost):
    """TSR-Adam: r × r cores of most steps, and sketches of those that refresh bases."""

    steps_alike = False

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.settings = TSRSettings.from_config(run.config.optimizer)
        self.plans: Mapping[str, MatrixPlan] = plan_matrices(run.global_shapes, self.settings)

    def plans_of(self, pp_rank: int) -> list[MatrixPlan]:
        """Return the plans of a rank's compressed matrices, in the order of backward."""
        return [self.plans[n] for n in reversed(self.run.pieces_of(pp_rank)) if n in self.plans]

    def sent(self, pp_rank: int, refreshing: Collection[int]) -> list[Traffic]:
        """Return what a step sends in which some of `plans_of`, by index, refresh."""
        run, ranks = self.run, self.run.ranks
        matrices, dense = [], []
        for name, piece in reversed(run.pieces_of(pp_rank).items()):
            if plan := self.plans.get(name):
                rows, columns = _oriented(plan, run.splits(name))
                over = {dim: ranks[dim] for dim in rows}, {dim: ranks[dim] for dim in columns}
                matrices.append(TSRMatrix(plan, *over))
            else:
                dense.append(prod(piece))
        replicas = {"dp_replicate": run.replicas} if run.replicas > 1 else {}
        return tsr_traffic(matrices, refreshing, dense, replicas, self.settings)

    def traffic(self, pp_rank: int) -> list[Traffic]:
        """Return what a step without a refresh sends."""
        return self.sent(pp_rank, ())

    def refreshes(self, pp_rank: int) -> Counter[tuple[int, ...]]:
        """Return the steps of a period after the first, by the matrices that refresh together."""
        plans = self.plans_of(pp_rank)
        steps = lcm(*{plan.interval for plan in plans})
        return Counter(_due(plans, step, 1) for step in range(steps))

    def mean_traffic(self, pp_rank: int) -> list[Traffic]:
        """Return what a step sends on average over the refreshes, rounded."""
        times, rows = self.refreshes(pp_rank), []
        for due, count in times.items():
            for row in self.sent(pp_rank, due):
                rows.append(replace(row, calls=row.calls * count, elements=row.elements * count))
        return mean_of(rows, times.total())

    def kinds_of_steps(self, pp_rank: int) -> dict[str, list[Traffic]]:
        """Return what the first step sends, the later step that sends most, and others."""
        plans, dtypes = self.plans_of(pp_rank), self.run.wire_dtypes
        later = [self.sent(pp_rank, due) for due in self.refreshes(pp_rank)]
        return {
            "ordinary": self.traffic(pp_rank),
            "first": self.sent(pp_rank, _due(plans, 0, 0)),
            "largest later": max(later, key=lambda rows: sent_bytes(rows, dtypes)),
            "average": self.mean_traffic(pp_rank),
        }

    def own(self, pieces: NamedShapes) -> tuple[list[tuple[MatrixPlan, Shape]], NamedShapes]:
        """Divide pieces into compressed ones, as they are projected, and those of AdamW."""
        own = []
        for name, piece in pieces.items():
            if plan := self.plans.get(name):
                own.append((plan, _oriented(plan, piece)))
        return own, {name: piece for name, piece in pieces.items() if name not in self.plans}

    def state_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of bases and moments, fp32 or wider, of all model parts of a rank.

        A compressed matrix has U (m, r) and V (n, r), sharded like its rows and columns, and two
        moments (r, r); with one-sided projection U and two moments (r, n). Others have AdamW's.
        """
        own, others = self.own(pieces)
        numbers = MOMENTS * sum(map(prod, others.values()))
        for plan, (m, n) in own:
            numbers += plan.rank * (m + n * plan.two_sided) + MOMENTS * plan.core_elements(n)
        return STEP_BYTES + COUNTER_BYTES * len(own) + self.wide * numbers

    def buffer_bytes(self, pieces: NamedShapes) -> int:
        """Return the bytes of the cores of a step."""
        own, _ = self.own(pieces)
        return 4 * sum(plan.core_elements(n) for plan, (_, n) in own)

    def work(self, pp_rank: int) -> Work:
        """Return projections and lifts, without refreshes: mostly decompositions of (k, k)."""
        own, others = self.own(self.run.pieces_of(pp_rank))
        flops = sum(plan.step_flops(*sides) for plan, sides in own)
        passed = TSR_PASSES * self.wide * sum(prod(sides) for _, sides in own)
        traffic = passed + self.adamw_traffic(others)
        return Work({(flops, 0.0): 1}, traffic=traffic, kernels=TSR_KERNELS * len(own))


def _oriented(plan: MatrixPlan, sides: Sequence[Side]) -> tuple[Side, ...]:
    """Return a parameter's sides, or what splits them, as rows and columns of its projection."""
    return tuple(reversed(sides) if plan.transposed else sides)


def _due(plans: list[MatrixPlan], step: int, after: int) -> tuple[int, ...]:
    """Return the places of the matrices that refresh at a step (`MatrixPlan.is_due`)."""
    return tuple(i for i, plan in enumerate(plans) if plan.is_due(step, after))
