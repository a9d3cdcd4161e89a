# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A refresh: new bases of the matrices that are due, found in rounds."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchtitan_lr.optim.buckets import split_buckets
from torchtitan_lr.optim.tsr.drift import Drift, Matrix
from torchtitan_lr.optim.tsr.selection import BUCKET_ELEMENTS
from torchtitan_lr.optim.tsr.stack import MatrixStack, NewBases, read
from torchtitan_lr.optim.tsr.sums import Exchange, Groups
from torchtitan_lr.optim.tsr.svd import randomized_svd


def find_bases(
    due: Mapping[MatrixStack, Sequence[int]], groups: Groups, drift: Drift, rotates: bool
) -> list[NewBases]:
    """Find U, Σ, V ← randomized SVD of ΣG of matrices that are due, as places in their stack.

    ``drift`` compares what the replicas have found; ``rotates`` says whether moments need overlaps.
    """
    found = []
    for matrices in _rounds(due):
        together = _decompose(matrices, groups, drift)
        if rotates:
            _find_overlaps(together, groups)
        found += together
    return found


def _rounds(due: Mapping[MatrixStack, Sequence[int]]) -> list[dict[MatrixStack, list[int]]]:
    """Share out the matrices that are due over rounds, each decomposed together.

    What a round holds and gathers fits into one bucket, and its matrices have the same q.
    """
    matrices = [(stack, index) for stack, indices in due.items() for index in indices]
    sizes = [stack.held for stack, _ in matrices]
    rounds: list[dict[MatrixStack, list[int]]] = []
    for bucket in split_buckets(sizes, BUCKET_ELEMENTS):
        by_iterations: dict[int, dict[MatrixStack, list[int]]] = {}
        for stack, index in (matrices[place] for place in bucket):
            same = by_iterations.setdefault(stack.plan.power_iterations, {})
            same.setdefault(stack, []).append(index)
        rounds += by_iterations.values()
    return rounds


def _decompose(
    matrices: Mapping[MatrixStack, list[int]], groups: Groups, drift: Drift
) -> list[NewBases]:
    """Find the new bases of one round's matrices, and their cores."""
    exchange = Exchange([stack.layout for stack in matrices], groups)
    batches = [stack.batch(indices, groups) for stack, indices in matrices.items()]
    (iterations,) = {stack.plan.power_iterations for stack in matrices}
    svds = randomized_svd(batches, iterations, exchange)
    refreshed: list[Matrix] = []
    computed: list[Sequence[Tensor]] = []
    found: list[NewBases] = []
    for (stack, indices), svd in zip(matrices.items(), svds, strict=True):
        for place, index in enumerate(indices):
            refreshed.append(Matrix(stack.plans[index].name, stack.tensors(index)))
            computed.append((svd.U[place], svd.S[place], svd.V[place]))
        # In the new bases UᵀGV is diag(σ), and UᵀG is diag(σ)Vᵀ: nothing is sent for it.
        if stack.plan.two_sided:
            core = torch.diag_embed(svd.S)  # (b, r, r)
            found.append(NewBases(stack, indices, svd.U, svd.V, core))
        else:
            core = svd.S[..., None] * svd.V.mT  # (b, r, n)
            found.append(NewBases(stack, indices, svd.U, None, core))
    drift.compare(refreshed, computed)
    return found


def _find_overlaps(found: Sequence[NewBases], groups: Groups) -> None:
    """Find the old bases in the new ones, U₊ᵀU and V₊ᵀV, summed over the shards of rows."""
    exchange = Exchange([new.stack.layout for new in found], groups)
    of_U, of_V = [], []
    for new in found:
        of_U.append(new.U.mT @ read(new.stack.U, new.indices))
        if new.V is not None and new.stack.V is not None:  # of all matrices of a run, or none
            of_V.append(new.V.mT @ read(new.stack.V, new.indices))
    exchange.sum(of_U, "rows")
    if of_V:
        exchange.sum(of_V, "columns")
    for new, overlap in zip(found, of_U, strict=True):
        new.U_overlap = overlap
    for new, overlap in zip(found, of_V, strict=False):
        new.V_overlap = overlap
