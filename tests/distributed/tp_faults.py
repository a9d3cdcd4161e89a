# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Deliberate mistakes for the negative controls, as context managers around a run on a rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lr.collectives import (
    Ranks,
    copy_to_ranks,
    gather_replicated,
    own_slice,
    reduce_over_ranks,
)
from torchtitan_lr.models import ends, lanes, linears, norms
from torchtitan_lr.models.lanes import lane_sum, spread
from torchtitan_lr.models.norms import Reduction


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Exchange an attribute for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def online_twin(
    x: Tensor,
    gamma: Tensor,
    dim: int,
    eps: float,
    weights: Sequence[Tensor],
    how: Reduction,
    fault: str,
) -> list[Tensor]:
    """`online_down` written with g alone and differentiated by autograd, with a fault or none."""
    own = x.square().sum(-1, keepdim=True)
    total = own if fault == "local" else reduce_over_ranks(own, how.ranks)
    width = x.shape[-1] if fault == "local" else dim
    if fault == "detached":
        total = total.detach()
    scaled = x * gamma
    rstd = torch.rsqrt(total / width + eps)
    if fault == "eps_twice":  # normalized locally with ε, restored without, normalized globally
        scaled = scaled * torch.rsqrt(own / width + eps) * (own / width).sqrt()
    if fault == "local":
        scaled, rstd = scaled * rstd, torch.ones_like(rstd)
    h = reduce_over_ranks(F.linear(scaled, torch.cat(list(weights))), how.ranks)
    return list((h * rstd).split([weight.shape[0] for weight in weights], dim=-1))


def local_norm(x: Tensor, gamma: Tensor, dim: int, eps: float, ranks: Ranks) -> Tensor:
    """RMSNorm of a shard by its own rms."""
    return F.rms_norm(x, x.shape[-1:], gamma, eps)


@contextmanager
def partial_latents_cross() -> Iterator[None]:
    """LaX carries each rank's term of the latents, taken in front of the all-reduce."""
    terms: dict[int, Tensor] = {}
    alive: list[Tensor] = []  # ids stay unique while their tensors live
    down, mix = linears.DownEdge.forward, linears.MixEdge.forward

    def unsummed(x: Tensor, weights: Sequence[Tensor], how: Reduction) -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    def keep_terms(self: Any, x: Tensor, group: Any, norm: Any = None) -> list[Tensor]:
        latents = down(self, x, group, norm)
        with replaced(linears, "down_products", unsummed):
            own = down(self, x, group, norm)
        terms.update({id(latent): term for latent, term in zip(latents, own, strict=True)})
        alive.extend(latents)
        return latents

    def mix_terms(self: Any, latents: Any, carried: Any, linears: Any) -> list[Tensor]:
        return mix(self, latents, carried and [terms[id(latent)] for latent in carried], linears)

    with (
        replaced(linears.DownEdge, "forward", keep_terms),
        replaced(linears.MixEdge, "forward", mix_terms),
    ):
        yield


def unsummed_copy(module: Any) -> AbstractContextManager[None]:
    """f without its all-reduce."""
    return replaced(module, "copy_to_ranks", lambda x, ranks: x)


def twin(fault: str) -> AbstractContextManager[None]:
    return replaced(linears, "online_down", partial(online_twin, fault=fault))


def slice_the_sum(out: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """All-reduce and slice where a reduce-scatter belongs."""
    return own_slice(reduce_over_ranks(out, ranks), ranks, dim)


def own_gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Stand-in for gathering dS: this rank's token shard in its place, zeros elsewhere."""
    parts = [torch.zeros_like(x)] * ranks.size
    parts[ranks.rank] = x
    return torch.cat(parts, dim)


@contextmanager
def own_tokens_statistic_gradient() -> Iterator[None]:
    """Sequence form: dS of the own tokens only."""
    gather = norms.all_gather

    def gather_others(tensors: Sequence[Tensor], ranks: Ranks, dim: int) -> list[Tensor]:
        statistic, *rest = tensors
        return [own_gather(statistic, ranks, dim), *gather(rest, ranks, dim)]

    with replaced(norms, "all_gather", gather_others):
        yield


@contextmanager
def reduced_in_front_of_norms() -> Iterator[None]:
    """CAAT-Net with Megatron-LM's backward: gradients are reduced before the norms' backward.

    Of the shared channels, by f in front of the column-parallel linears; g has no backward, and
    neither the norms' weights nor the embedding are reduced. Half of the channels are shared.
    """
    summed = norms.normalize

    def share(x: Tensor, shared: int, wide: bool, ranks: Ranks) -> Tensor:
        return spread(reduce_over_ranks(lane_sum(x, shared), ranks), x)

    def norm(x: Tensor, norm: Any, ranks: Ranks) -> Tensor:
        out = summed(x, norm, ranks)
        shared = out.shape[-1] // 2
        return torch.cat((copy_to_ranks(out[..., :shared], ranks), out[..., shared:]), -1)

    with (
        replaced(lanes, "share_channels", share),
        replaced(lanes, "normalize", norm),
        replaced(ends, "normalize", norm),
        unsummed_copy(norms),
        own_embedding_gradient(),
    ):
        yield


def own_embedding_gradient() -> AbstractContextManager[None]:
    """Each rank's lanes alone move the embedding."""
    return replaced(ends, "gather_partial", gather_replicated)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_fault": lambda: twin(""),
    "local_statistic": lambda: replaced(linears, "sync_norm", local_norm),
    "local_statistic_online": lambda: twin("local"),
    "detached_statistic": lambda: twin("detached"),
    "eps_twice": lambda: twin("eps_twice"),
    "partial_latents_cross": partial_latents_cross,
    "gradient_of_own_heads": lambda: replaced(
        linears, "start_sum", lambda gradient, ranks, dim: gradient
    ),
    "own_tokens_gate_gradient": lambda: unsummed_copy(linears),
    "own_tokens_norm_gradient": lambda: unsummed_copy(norms),
    "own_tokens_statistic_gradient": own_tokens_statistic_gradient,
    "reduced_in_front_of_norms": reduced_in_front_of_norms,
    "unsummed_norm_gradient": lambda: unsummed_copy(norms),
    "own_embedding_gradient": own_embedding_gradient,
    "slice_the_sum": lambda: replaced(linears, "scatter_sum", slice_the_sum),
}
