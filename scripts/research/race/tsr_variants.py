# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam with two changes that its paper does not have, to be measured before they get keys.

- Error feedback: a replica adds what its core dropped, G - U Uᵀ G V Vᵀ, to its next gradient, as
  Dion and GreedyLore do. It costs an fp32 matrix of every compressed gradient's size per replica.
- TSR-Muon: the direction is the polar factor of the core's momentum, not Adam's. It sends no
  further byte. Embedding and head keep Adam, as in Muon.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.optim.spectral.algebra import gram, inverse_root
from torchtitan_lr.optim.tsr.algorithm import TSRAdam
from torchtitan_lr.optim.tsr.container import TSROptimizers
from torchtitan_lr.optim.tsr.selection import EMBEDDING, HEAD
from torchtitan_lr.optim.tsr.stack import MatrixStack, NewBases
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer
from torchtitan_lr.training.register import BuildOptimizers, build_optimizers


class FeedbackStack(MatrixStack):
    """A stack whose matrices add what their cores have dropped to the next gradient.

    Attributes:
        residuals: Of every matrix, (b, m, n), this replica's own.
        refreshing: Gradients with their residuals of matrices that get new bases, by place.
    """

    residuals: Tensor
    refreshing: dict[int, Tensor]

    def project(self, index: int) -> None:
        """Accumulate the core of gradient and residual, and keep what it drops."""
        parameter = self.parameters[index]
        assert parameter.grad is not None and self.V is not None
        gradient = self._oriented(local_part(parameter.grad)).to(self.dtype)
        parameter.grad = None
        whole = gradient + self.residuals[index]
        self.C[index].add_(self.U[index].mT @ whole @ self.V[index])
        self.residuals[index] = self.dropped(whole, index)

    def add_residual(self, index: int) -> None:
        """Add the residual to a gradient that is decomposed, before replicas sum it."""
        gradient = self.parameters[index].grad
        assert gradient is not None
        gradient = self._oriented(local_part(gradient))
        gradient.add_(self.residuals[index])
        self.refreshing[index] = gradient.to(self.dtype, copy=True)

    def change_bases(self, new: NewBases, rejected: Tensor) -> None:
        """Replace the bases, and keep what the cores of the new ones drop."""
        super().change_bases(new, rejected)
        for index in new.indices:
            self.residuals[index] = self.dropped(self.refreshing.pop(index), index)

    def dropped(self, whole: Tensor, index: int) -> Tensor:
        """Return what the bases do not span of a matrix: G - U Uᵀ G V Vᵀ (m, n)."""
        assert self.V is not None
        U, V = self.U[index], self.V[index]
        return whole - U @ (U.mT @ whole @ V) @ V.mT


class FeedbackTSRAdam(TSRAdam):
    """TSR-Adam over `FeedbackStack`; a step has one micro-batch, and no step is rejected."""

    def gradient_arrived(self, parameter: Tensor) -> None:
        """Add the residual of a matrix that gets new bases, and go on as TSR-Adam."""
        step = self._running
        if step is not None and parameter.grad is not None and parameter in self._compressed:
            stack, index = self._compressed[parameter]
            if parameter not in step.projected and isinstance(stack, FeedbackStack):
                with torch.no_grad():
                    stack.add_residual(index)
        super().gradient_arrived(parameter)


class OrthogonalStack(MatrixStack):
    """A stack whose direction is the polar factor of the cores' momentum."""

    def direction(self, steps: float, hyper: Mapping[str, Any], rejected: Tensor) -> Tensor:
        """Return √r times the polar factor (b, r, r): the norm of r² entries of 1, Adam's size."""
        average = self.exp_avg.lerp(self.C, 1 - float(hyper["beta1"]))
        torch.where(rejected, self.exp_avg, average, out=self.exp_avg)
        D = inverse_root(gram(average)) @ average
        return (sqrt(self.plan.rank) * D).masked_fill(rejected, 0.0)


def with_feedback(optimizer: TSRAdam) -> None:
    """Give an optimizer that has not run error feedback."""
    optimizer.__class__ = FeedbackTSRAdam
    for stack in optimizer.stacks:
        stack.__class__ = FeedbackStack
        assert isinstance(stack, FeedbackStack) and stack.V is not None
        (b, m, _), n = stack.U.shape, stack.V.shape[1]
        stack.residuals = stack.U.new_zeros(b, m, n)
        stack.refreshing = {}


def with_polar_factors(optimizer: TSRAdam) -> None:
    """Let the matrices of the blocks have polar factors as directions."""
    for stack in optimizer.stacks:
        if not {plan.name for plan in stack.plans} & {EMBEDDING, HEAD}:
            stack.__class__ = OrthogonalStack


def tsr_variant(change: Callable[[TSRAdam], None]) -> BuildOptimizers:
    """Return what builds TSR-Adam with a change."""

    def build(
        model_parts: list[nn.Module], config: OptimizerConfig, dims: ParallelDims
    ) -> OptimizersContainer:
        optimizers = build_optimizers(model_parts, replace(config, name="TSRAdam"), dims)
        assert isinstance(optimizers, TSROptimizers)
        change(optimizers.gradients)
        return optimizers

    return build
