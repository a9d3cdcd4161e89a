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
Tensors are placed as their parameters: with 32 bits layouts inside a replica do not matter.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compat.process_groups import all_gather
from torchtitan_lr.config.schema import Outer

BLOCK = 128
"""Numbers that are rounded with a common scale, all of one parameter.

Ranks that hold a parameter alike round it alike then, whatever else each of them holds.
"""


def message_entries(entries: int, bits: int) -> int:
    """Return the numbers of a parameter in a message: whole blocks of those that are rounded."""
    return entries if bits == 32 else -(-entries // BLOCK) * BLOCK


def coded_bytes(entries: int, bits: int) -> int:
    """Return the bytes of a message of `encode`."""
    return entries // BLOCK * (BLOCK * bits // 8 + 4)


def encode(x: Tensor, bits: int) -> Tensor:
    """Round whole blocks x (n,) to multiples of a scale per block; return bytes (coded_bytes,).

    The largest magnitude of a block is 2ᵇ⁻¹ - 1 times its scale: an error is at most scale / 2.
    """
    blocks = x.float().view(-1, BLOCK)
    most = 2 ** (bits - 1) - 1
    scale = torch.linalg.vector_norm(blocks, torch.inf, 1, keepdim=True) / most  # (blocks, 1)
    # A block of zeros has scale 0.
    whole = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    codes = whole.to(torch.int16 if bits == 16 else torch.int8).view(torch.uint8)
    if bits < 8:
        places = codes.view(-1, 8 // bits, BLOCK * bits // 8)  # parts of a block share bytes
        codes = places[:, -1]
        for place in reversed(range(8 // bits - 1)):
            codes = codes << bits | places[:, place] & 2**bits - 1
    return torch.cat([codes, scale.view(torch.uint8)], 1).flatten()


def decode(message: Tensor, bits: int) -> Tensor:
    """Return the fp32 numbers (n,) of a message of `encode`."""
    rows = message.view(-1, BLOCK * bits // 8 + 4)
    codes, scale = rows[:, :-4].view(torch.int8), rows[:, -4:].view(torch.float32)
    if bits == 16:
        codes = codes.view(torch.int16)
    elif bits < 8:  # a shift to the right repeats the sign
        places = range(8 // bits)
        codes = torch.cat([codes << 8 - bits * (p + 1) >> 8 - bits for p in places], 1)
    return (codes * scale).flatten()


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
    return [f for f in range(fragments) if (step - every * f // fragments) % every == 0]


class OuterSteps:
    """The outer optimizer of a rank's parameters, with the exchange between its replicas."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        layers: int,
        section: Outer,
        mesh: DeviceMesh | None = None,  # of the replicas, if there are several
    ) -> None:
        self.section, self._mesh, self.parameters = section, mesh, dict(parameters)
        self.replicas, self.replica = 1, 0
        if mesh is not None:
            self.replicas, self.replica = mesh.size(), mesh.get_local_rank()
        self._fragments = layer_fragments(self.parameters, layers, section.fragments)
        # Whether the parameters are the common weights, and were when the last step began.
        self.together = self.began_together = True
        # By name, as after the last exchange.
        self.common = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.common.items()}
        self._nothing = local_part(next(iter(self.common.values()))).new_empty(0)
        # Weights that were sent (copies, if a step comes in between); all replicas' messages, or
        # with 32 bits their sum; what waits for them.
        self._sent: tuple[dict[str, Tensor], Tensor, dist.Work | None] | None = None
        self.residual: dict[str, Tensor] = {}  # what rounding has left of this replica's messages
        if section.bits < 32 and section.feedback:
            self.residual = {name: torch.zeros_like(p) for name, p in self.common.items()}

    @torch.no_grad()
    def after(
        self,
        step: int,
        last: bool = False,
        sending: AbstractContextManager[object] | None = None,
        rejected: bool = False,
    ) -> bool:
        """Exchange the fragments that are due after a step, all of them after the last one.

        Call it on every rank. It returns False, and the exchange changes nothing, if a rank's mean
        is not finite. Messages are sent inside of ``sending``; those that overlap are taken in here
        after the next step. Rejected steps that leave all weights common exchange nothing.
        """
        fragments, self.began_together = self.section.fragments, self.together
        self.together = self.together and rejected
        if self._sent is not None:
            if not self._take_in():
                return False
            self.together = rejected and fragments == 1
        due = [*range(fragments)] if last else due_after(step, self.section.every, fragments)
        if not due or self.together:
            return True
        overlaps = self.section.overlap and not last
        with sending or nullcontext():
            self._send(due, overlaps)
        self.together = not overlaps and len(due) == fragments
        return overlaps or self._take_in()

    @torch.no_grad()
    def resume(self, step: int) -> None:
        """Send again what was on its way when step ``step`` was saved; call it on every rank."""
        due = due_after(step, self.section.every, self.section.fragments)
        if self.section.overlap and step and due and not self.together:
            self._send(due, overlaps=True)

    def _send(self, due: list[int], overlaps: bool) -> None:
        """Begin to send the changes of fragments; a pipeline rank may have nothing of one."""
        own = {n: local_part(p) for n, p in self.parameters.items() if self._fragments[n] in due}
        messages, arrival = torch.cat([self._nothing, *map(self._change, own)]), None  # (n,)
        if self.section.bits < 32 and len(messages):
            messages = encode(messages, self.section.bits)
        if self._mesh is not None and own:
            group, message = self._mesh.get_group(), messages
            if self.section.bits == 32:  # the sum, in place
                arrival = dist.all_reduce(message, group=group, async_op=True)
            else:
                messages = message.new_empty(self.replicas * len(message))
                arrival = all_gather(messages, message, group=group, async_op=True)
        weights = {name: own[name].clone() if overlaps else own[name] for name in own}
        self._sent = weights, messages, arrival

    def _change(self, name: str) -> Tensor:
        change = local_part(self.common[name]) - local_part(self.parameters[name])
        if self.residual:
            change += local_part(self.residual[name])
        more = message_entries(change.numel(), self.section.bits) - change.numel()
        return F.pad(change.flatten(), (0, more)) if more else change.flatten()

    def _take_in(self) -> bool:
        """Step along the mean of what was sent, if all ranks' is finite."""
        assert self._sent is not None
        (weights, messages, arrival), self._sent = self._sent, None
        if arrival is not None:
            arrival.wait()
        bits = self.section.bits
        sizes = [message_entries(value.numel(), bits) for value in weights.values()]
        mean = known = messages
        if bits < 32 and len(messages):
            coded = messages.chunk(self.replicas)
            known, mean = decode(coded[self.replica], bits), self._nothing.new_zeros(sum(sizes))
            for replica, message in enumerate(coded):  # in one order on all ranks
                mean += known if replica == self.replica else decode(message, bits)
        mean /= self.replicas
        bad = (~mean.sum().isfinite()).float()  # without a copy of them
        if dist.is_initialized():
            dist.all_reduce(bad)
        if bad.item():  # the host waits for the exchange
            return False
        parts = mean.split(sizes), known.split(sizes)
        for (name, sent), *of_message in zip(weights.items(), *parts, strict=True):
            self._step(name, sent, *of_message)
        return True

    def _step(self, name: str, sent: Tensor, delta: Tensor, known: Tensor) -> None:
        """Step along the mean change Δ; others have ``known`` of one's own. Both may be padded."""
        section, eta, mu = self.section, self.section.lr, self.section.momentum
        common, own = local_part(self.common[name]), local_part(self.parameters[name])
        momentum, entries = local_part(self.momentum[name]), common.numel()
        delta = delta[:entries].view_as(common)
        if self.residual:
            residual = local_part(self.residual[name])
            residual += common - sent
            residual -= known[:entries].view_as(common)
        # θ - η (Δ + μ (μ m + Δ)), or θ - η (μ m + Δ), with θ - Δ as the replicas' mean: what a
        # single replica has trained stays bit for bit with η = 1 and μ = 0.
        mean = sent if self.replicas == 1 and section.bits == 32 else common - delta
        weight, kept = (eta * (1 + mu), eta * mu * mu) if section.nesterov else (eta, eta * mu)
        common.lerp_(mean, weight).sub_(momentum, alpha=kept)
        momentum.mul_(mu).add_(delta)
        own.sub_(sent).add_(common)  # uₖ, which is 0 where the weights are those that were sent
