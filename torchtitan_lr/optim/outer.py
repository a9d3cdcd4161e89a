# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Outer steps: replicas train apart, and exchange what they have changed every H steps.

DiLoCo (arXiv 2311.08105, algorithm 1) has AdamW inside, MuLoCo (arXiv 2505.23725) Muon. Of replica
k of K, with θ the common weights and θₖ its own:

    Δₖ = θ - θₖ                       what it has changed, which is sent
    Δ = Σₖ Δₖ / K
    m ← μ m + Δ
    θ ← θ - η (Δ + μ m)               with Nesterov; else θ - η m
    θₖ ← θ

With fewer than 32 bits a replica sends Q(Δₖ + eₖ) and keeps eₖ ← Δₖ + eₖ - Q(Δₖ + eₖ). A message
that overlaps travels during the next step, whose change uₖ stays the replica's own: θₖ ← θ + uₖ.
Every tensor here is placed as its parameter, so that layouts inside a replica do not matter.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.config.schema import Outer

BLOCK = 128
"""Numbers that are rounded with a common scale."""


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
    scale = torch.linalg.vector_norm(blocks, torch.inf, 1, keepdim=True) / most  # (blocks, 1)
    # A block of zeros has scale 0.
    whole = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    if bits == 16:
        codes = whole.to(torch.int16).view(torch.uint8)
    else:
        unsigned = whole.add_(most).to(torch.uint8)
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
        whole = torch.stack(places, -1).flatten(1).float().sub_(most)
    return whole.mul_(scale).flatten()[:entries]


def layer_fragments(names: Iterable[str], layers: int, fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter: blocks in order, the ends with the first and last."""
    found = {}
    for name in names:
        match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        end = 0 if "embeddings" in name else fragments - 1
        found[name] = int(match[1]) * fragments // layers if match else end
    return found


def due_after(step: int, every: int, fragments: int) -> list[int]:
    """Return the fragments that are exchanged after a step; fragment f is at step fH/F."""
    offsets = (every * fragment // fragments for fragment in range(fragments))
    return [f for f, offset in enumerate(offsets) if (step - offset) % every == 0]


class _Exchange(NamedTuple):
    """Messages on their way."""

    names: list[str]
    changes: Tensor  # Δₖ + eₖ of these parameters (n,)
    message: Tensor  # with 32 bits their sum, once it is there
    messages: Tensor  # of all replicas
    arrival: dist.Work | None


class OuterSteps:
    """The outer optimizer of a rank's parameters, with the exchange between its replicas.

    Attributes:
        common: The common weights by name, as after the last exchange.
        momentum: The outer momentum by name.
        residual: What rounding has left of this replica's messages, by name; empty without it.
        together: Whether the parameters are the common weights, as after an exchange of all.
        began_together: Whether they were when the last step began: its loss is of these weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layers: int,
        section: Outer,
        mesh: DeviceMesh | None = None,
    ) -> None:
        # ``mesh`` is of the replicas, if there are several.
        self.section, self._mesh, self.parameters = section, mesh, dict(parameters)
        self.replicas, self.replica = 1, 0
        if mesh is not None:
            self.replicas, self.replica = mesh.size(), mesh.get_local_rank()
        self._fragments = layer_fragments(self.parameters, layers, section.fragments)
        self.together = self.began_together = True
        self.common = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.common.items()}
        self._sent: _Exchange | None = None
        self.residual: dict[str, Tensor] = {}
        if section.bits < 32 and section.feedback:
            self.residual = {name: torch.zeros_like(p) for name, p in self.common.items()}

    @torch.no_grad()
    def after(
        self, step: int, last: bool = False, sending: AbstractContextManager[object] | None = None
    ) -> bool:
        """Exchange the fragments that are due after a step, all of them after the last one.

        Call it on every rank. It returns False, and has changed nothing by that exchange, if a
        rank's mean is not finite. The messages are sent inside of ``sending``. Those that overlap
        are taken in here after the next step.
        """
        fragments, self.began_together = self.section.fragments, self.together
        self.together = False
        if self._sent is not None and not self._take_in(late=True):
            return False
        due = [*range(fragments)] if last else due_after(step, self.section.every, fragments)
        if not due:
            return True
        with sending or nullcontext():
            self._send(due)
        if self.section.overlap and not last:
            return True
        self.together = len(due) == fragments
        return self._take_in()

    @torch.no_grad()
    def resume(self, step: int) -> None:
        """Send again what was on its way when step ``step`` was saved; call it on every rank."""
        due = due_after(step, self.section.every, self.section.fragments)
        if self.section.overlap and due and not self.together:
            self._send(due)

    def _send(self, due: list[int]) -> None:
        """Begin to send the changes of fragments; a pipeline rank may have nothing of one."""
        names = [name for name, fragment in self._fragments.items() if fragment in due]
        none = local_part(next(iter(self.common.values()))).new_empty(0)
        changes = torch.cat([none, *map(self._change, names)])  # (n,): Δₖ + eₖ
        bits = self.section.bits
        message = changes.clone() if bits == 32 or not names else encode(changes, bits)
        messages, arrival = message, None
        if self._mesh is not None and names:
            group = self._mesh.get_group()
            if bits == 32:  # the sum, in place
                arrival = dist.all_reduce(message, group=group, async_op=True)
            else:
                messages = message.new_empty(self.replicas * len(message))
                arrival = dist.all_gather_into_tensor(messages, message, group=group, async_op=True)
        self._sent = _Exchange(names, changes, message, messages, arrival)

    def _take_in(self, late: bool = False) -> bool:
        """Step along the mean of what was sent, a step ago if ``late``, if all ranks' is finite."""
        assert self._sent is not None
        names, changes, message, messages, arrival = self._sent
        self._sent = None
        if arrival is not None:
            arrival.wait()
        mean, sent = self._mean(changes, message, messages)
        bad = (~mean.sum().isfinite()).float()  # without a copy of them
        if dist.is_initialized():
            dist.all_reduce(bad)
        if bad.item():  # the host waits for the exchange
            return False
        sizes = [local_part(self.common[name]).numel() for name in names]
        parts = (x.split(sizes) for x in (changes, mean, sent))
        for name, change, delta, known in zip(names, *parts, strict=True):
            self._step(name, change, delta, known, late)
        return True

    def _change(self, name: str) -> Tensor:
        change = local_part(self.common[name]) - local_part(self.parameters[name])
        if self.residual:
            change += local_part(self.residual[name])
        return change.flatten()

    def _mean(self, changes: Tensor, message: Tensor, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean over the replicas (n,), and what the others know of this one (n,)."""
        bits = self.section.bits
        if bits == 32 or not len(changes):
            return message.div_(self.replicas), changes
        total = torch.zeros_like(changes)
        for each in messages.chunk(self.replicas):  # in one order on all ranks
            total += decode(each, len(changes), bits)
        return total.div_(self.replicas), decode(message, len(changes), bits)

    def _step(self, name: str, change: Tensor, delta: Tensor, known: Tensor, late: bool) -> None:
        """Step a parameter along the mean change Δ (n,), from the common weights on."""
        section, eta, mu = self.section, self.section.lr, self.section.momentum
        common, own = local_part(self.common[name]), local_part(self.parameters[name])
        momentum = local_part(self.momentum[name])
        residual = local_part(self.residual[name]) if self.residual else None
        change, delta, known = (x.view_as(common) for x in (change, delta, known))
        if late:
            before = common - change if residual is None else common - change + residual
            since = own - before  # uₖ
        # θ - η (Δ + μ (μ m + Δ)), or θ - η (μ m + Δ), with θ - Δ as the replicas' mean: what a
        # single replica has trained stays bit for bit with η = 1 and μ = 0.
        alone = self.replicas == 1 and section.bits == 32 and not late
        trained = own if alone else common - delta
        weight, kept = (eta * (1 + mu), eta * mu * mu) if section.nesterov else (eta, eta * mu)
        common.copy_(torch.lerp(common, trained, weight).sub_(momentum, alpha=kept))
        momentum.mul_(mu).add_(delta)
        own.copy_(common)
        if late:
            own += since
        if residual is not None:
            residual.copy_(change - known)
