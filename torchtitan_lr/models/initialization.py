# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Initial weights that depend on the seed and on the parameter's name, and on nothing else.

The usual way, one random stream consumed parameter by parameter, makes the weights depend on the
order of construction and on how the model is sharded (a sharded draw on a CPU mesh even gives
every shard the same values). Here each parameter has a stream of its own, the full tensor is
drawn on every rank, and a sharded parameter keeps its slice: any layout starts from the same
weights, without communication.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lr.compat.dtensor import local_slice
from torchtitan_lr.compat.names import clean_name
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.linears import LowRankLinear

DENSE_STD = 0.02
"""Embedding, head and full-rank linears: N(0, 0.02²), LLaMA's ``initializer_range``. CoLA
does not say how its full-rank baselines start."""


def factor_std(d_in: int, d_out: int, rank: int) -> float:
    """Return the standard deviation of both factors of a low-rank linear.

    It is r^(-1/4) · (d_in + d_out)^(-1/4): an entry of BA is a sum of r products, so its standard
    deviation is √r · std² = (d_in + d_out)^(-1/2), whatever the rank.
    """
    return float(rank**-0.25 * (d_in + d_out) ** -0.25)


def init_parameters(model: nn.Module, args: LlamaArgs) -> None:
    """Draw every parameter of a model or of a part of one.

    Raises:
        RuntimeError: If a parameter belongs to no known kind of module.
    """
    std = _standard_deviations(model)
    for fqn, parameter in model.named_parameters():
        if fqn not in std:
            raise RuntimeError(f"no initialization is defined for parameter {fqn}")
        name = clean_name(fqn)
        rows = private_rows(name, parameter.shape[0], args)
        draw_parameter(parameter, name, std[fqn], args.init_seed, rows, args.lanes**0.5)


def private_rows(fqn: str, rows: int, args: LlamaArgs) -> slice:
    """Rows of a weight whose outputs no other lane adds to (CAAT-Net, section 3.2).

    A shared channel is the sum of G terms. A private one is a single term, which starts √G times as
    large, so that all channels have the same variance.

    Returns:
        The rows, none of them where the model has no lanes or the weight does not end in one.
    """
    ends = ".A.weight" if args.low_rank else (".wo.weight", ".w2.weight")
    if args.lanes == 1 or not fqn.endswith(ends):
        return slice(0, 0)
    return slice(args.shared_channels(rows), rows)


@torch.no_grad()
def draw_parameter(
    parameter: Tensor,
    fqn: str,
    std: float | None,
    seed: int,
    larger: slice = slice(0, 0),
    factor: float = 1.0,
) -> None:
    """Fill one parameter in place with its slice of a full draw.

    Args:
        parameter: Plain tensor or DTensor, in any dtype; drawn in fp32 on its device.
        fqn: Its full name, which selects the random stream.
        std: Standard deviation of the normal distribution around 0, or None for ones.
        seed: Seed, together with the name.
        larger: Rows that are drawn larger.
        factor: By how much.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if std is None:
        local.fill_(1.0)
        return
    digest = hashlib.sha256(f"{seed}:{fqn}".encode()).digest()
    generator = torch.Generator(local.device).manual_seed(int.from_bytes(digest[:7], "big"))
    full = torch.empty(parameter.shape, dtype=torch.float32, device=local.device)
    full.normal_(0.0, std, generator=generator)
    full[larger] *= factor
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        if coordinate is None:  # this rank holds nothing of the parameter
            return
        mesh_shape = tuple(parameter.device_mesh.shape)
        full = local_slice(full, mesh_shape, coordinate, parameter.placements)
    local.copy_(full)


def _standard_deviations(model: nn.Module) -> dict[str, float | None]:
    """Return the standard deviation by parameter name, None for a parameter of ones."""
    std: dict[str, float | None] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, LowRankLinear):
            rank, d_in = module.A.weight.shape
            factor = factor_std(d_in, module.B.weight.shape[0], rank)
            std[f"{prefix}A.weight"] = std[f"{prefix}B.weight"] = factor
            std[f"{prefix}gate"] = None
        elif isinstance(module, nn.RMSNorm):
            std[f"{prefix}weight"] = None
        elif isinstance(module, nn.Linear | nn.Embedding):
            # The factors of a LowRankLinear come after their parent and keep its value.
            std.setdefault(f"{prefix}weight", DENSE_STD)
    return std
