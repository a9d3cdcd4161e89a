# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Outer steps: replicas train apart, and exchange what they have changed every H steps.

DiLoCo (arXiv 2311.08105, algorithm 1) has AdamW inside, MuLoCo (arXiv 2505.23725) Muon. Of replica
k of K, with θ the common weights and θₖ its own:

    Δₖ = θ - θₖ                       what it has changed, which is sent
    Δ = Σₖ Δₖ / K
    m ← μ m + Δ
    θ ← θ - η (Δ + μ m)               with Nesterov; else θ - η m
    θₖ ← θ

With fewer than 32 bits a replica sends Q(Δₖ + eₖ) and keeps eₖ ← Δₖ + eₖ - Q(Δₖ + eₖ). Every tensor
here is placed as its parameter, so that layouts inside a replica do not matter.
"""

import re
from collections.abc import Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.compat.dtensor import local_part, with_local_part

BLOCK = 128
"""Numbers that are rounded with a common scale."""

CODED_BITS = (2, 4, 8, 16)


@dataclass(frozen=True)
class OuterSettings:
    """The keys of ``[outer]``."""

    every: int
    lr: float
    momentum: float
    nesterov: bool
    bits: int
    feedback: bool
    fragments: int

    def due(self, step: int) -> list[int]:
        """Return the fragments that are exchanged after a step; fragment f is at step fH/F."""
        offsets = (self.every * f // self.fragments for f in range(self.fragments))
        return [f for f, offset in enumerate(offsets) if (step - offset) % self.every == 0]


def coded_bytes(entries: int, bits: int) -> int:
    """Return the bytes of a message of `encode`."""
    blocks = -(-entries // BLOCK)
    return blocks * (BLOCK * bits // 8 + 4)


def encode(x: Tensor, bits: int) -> Tensor:
    """Round numbers x (n,) to whole multiples of a scale per block; return bytes (coded_bytes,).

    The largest magnitude of a block is 2ᵇ⁻¹ - 1 times its scale: an error is at most scale / 2.
    """
    blocks = F.pad(x.float(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    most = 2 ** (bits - 1) - 1
    scale = blocks.abs().amax(1, keepdim=True) / most  # (blocks, 1)
    # A block of zeros has scale 0.
    whole = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    if bits == 16:
        codes = whole.to(torch.int16).view(torch.uint8)
    else:
        unsigned = (whole + most).to(torch.uint8)
        codes = torch.zeros_like(unsigned[:, :: 8 // bits])
        for place in range(8 // bits):
            codes |= unsigned[:, place :: 8 // bits] << place * bits
    return torch.cat([codes, scale.view(torch.uint8)], 1).flatten()


def decode(message: Tensor, entries: int, bits: int) -> Tensor:
    """Return the fp32 numbers (entries,) of a message of `encode`."""
    rows = message.view(-1, BLOCK * bits // 8 + 4)
    scale = rows[:, -4:].contiguous().view(torch.float32)  # (blocks, 1)
    codes, most = rows[:, :-4].contiguous(), 2 ** (bits - 1) - 1
    if bits == 16:
        whole = codes.view(torch.int16).float()
    else:
        places = [codes >> place * bits & 2**bits - 1 for place in range(8 // bits)]
        whole = torch.stack(places, -1).flatten(1).float() - most
    return (whole * scale).flatten()[:entries]


class OuterSteps:
    """The outer optimizer of a rank's parameters, with the exchange between its replicas.

    Attributes:
        common: The common weights by name, as after the last exchange.
        momentum: The outer momentum by name.
        residual: What rounding has left of this replica's messages, by name; empty without it.
        together: Whether the parameters are the common weights, as after an exchange of all.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        fragments: Mapping[str, int],
        settings: OuterSettings,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        # ``fragments`` says of each parameter in which fragment it is exchanged.
        self.settings, self._replicas = settings, replicas
        self._size = 1 if replicas is None else dist.get_world_size(replicas)
        self.parameters, self._fragments = dict(parameters), dict(fragments)
        self.together = True
        self.common = {name: copy_of(p) for name, p in parameters.items()}
        self.momentum = {name: zeros_like(p) for name, p in parameters.items()}
        self.residual: dict[str, Tensor] = {}
        if settings.bits < 32 and settings.feedback:
            self.residual = {name: zeros_like(p) for name, p in parameters.items()}

    def message_bytes(self) -> int:
        """Return the bytes that this rank sends each other replica of all fragments together."""
        total = 0
        for fragment in range(self.settings.fragments):
            parts = [local_part(self.common[name]) for name in self._names({fragment})]
            entries = sum(part.numel() for part in parts)
            if self.settings.bits == 32:
                total += sum(part.nbytes for part in parts)
            elif entries:
                total += coded_bytes(entries, self.settings.bits)
        return total

    def _names(self, fragments: Container[int]) -> list[str]:
        return [name for name, fragment in self._fragments.items() if fragment in fragments]

    @torch.no_grad()
    def after(
        self, step: int, last: bool = False, sending: AbstractContextManager[object] | None = None
    ) -> bool:
        """Exchange the fragments that are due after a step, all of them after the last one.

        Call it on every rank. It returns False, and has changed nothing, if a rank's mean is not
        finite. The messages are sent inside of ``sending``.
        """
        due = range(self.settings.fragments) if last else self.settings.due(step)
        if not due:
            self.together = False
            return True
        names = self._names(due)
        none = local_part(next(iter(self.common.values()))).new_empty(0)
        # A pipeline rank may have nothing of a fragment.
        changes = torch.cat([none, *(self._change(name) for name in names)])  # (n,): Δₖ + eₖ
        with sending or nullcontext():
            mean, sent = self._mean(changes) if names else (none, none)
        if not finite_everywhere(mean):
            return False
        left = changes.sub_(sent)
        sizes = [local_part(self.common[name]).numel() for name in names]
        for name, delta, rest in zip(names, mean.split(sizes), left.split(sizes), strict=True):
            self._step(name, delta)
            if self.residual:
                own = local_part(self.residual[name])
                own.copy_(rest.view_as(own))
        self.together = len(due) == self.settings.fragments
        return True

    def _change(self, name: str) -> Tensor:
        change = local_part(self.common[name]) - local_part(self.parameters[name])
        if self.residual:
            change += local_part(self.residual[name])
        return change.flatten()

    def _mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean over the replicas, and what this one has sent, of numbers x (n,)."""
        bits, size = self.settings.bits, self._size
        if bits == 32:
            total = x.clone()
            if size > 1:
                dist.all_reduce(total, group=self._replicas)
            return total / size, x
        message = encode(x, bits)
        messages = message.new_empty(size * len(message))
        if size > 1:
            dist.all_gather_into_tensor(messages, message, group=self._replicas)
        else:
            messages.copy_(message)
        total = torch.zeros_like(x)
        for each in messages.chunk(size):  # in one order on all ranks
            total += decode(each, len(x), bits)
        return total / size, decode(message, len(x), bits).to(x.dtype)

    def _step(self, name: str, delta: Tensor) -> None:
        """Step a parameter along the mean change Δ (n,), from the common weights on."""
        eta, mu, nesterov = self.settings.lr, self.settings.momentum, self.settings.nesterov
        common, own = local_part(self.common[name]), local_part(self.parameters[name])
        momentum, delta = local_part(self.momentum[name]), delta.view_as(common)
        # θ - η (Δ + μ (μ m + Δ)), or θ - η (μ m + Δ), with θ - Δ as the replicas' mean: what a
        # single replica has trained stays bit for bit with η = 1 and μ = 0.
        alone = self._size == 1 and self.settings.bits == 32
        trained = own if alone else common - delta
        weight, kept = (eta * (1 + mu), eta * mu * mu) if nesterov else (eta, eta * mu)
        common.copy_(torch.lerp(common, trained, weight).sub_(momentum, alpha=kept))
        momentum.mul_(mu).add_(delta)
        own.copy_(common)


def copy_of(parameter: Tensor) -> Tensor:
    """Return a copy that is placed as a parameter."""
    return with_local_part(parameter, local_part(parameter).detach().clone())


def zeros_like(parameter: Tensor) -> Tensor:
    """Return zeros that are placed as a parameter."""
    return with_local_part(parameter, torch.zeros_like(local_part(parameter).detach()))


def finite_everywhere(x: Tensor) -> bool:
    """Return whether a tensor is finite on every rank; the host waits for it."""
    bad = (~x.isfinite().all()).float()
    if dist.is_initialized():
        dist.all_reduce(bad)
    return not bad.item()


def layer_fragments(names: Iterable[str], layers: int, fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter: blocks in order, the ends with the first and last."""
    found = {}
    for name in names:
        match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if match:
            found[name] = int(match[1]) * fragments // layers
        else:
            found[name] = 0 if "embeddings" in name else fragments - 1
    return found
