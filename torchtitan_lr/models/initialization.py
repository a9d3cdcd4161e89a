# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Initial weights that depend on the seed and on the parameter's name, and on nothing else.

Each parameter has a random stream of its own, the full tensor is drawn on every rank, and a sharded
parameter keeps its slice: any layout starts from the same weights. (A sharded draw on a CPU mesh
even gives every shard the same values.)
"""

import hashlib

import torch
from torch import nn

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part, own_part
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.linears import LowRankLinear

# Embedding, head and full-rank linears: N(0, 0.02²), LLaMA's ``initializer_range``. CoLA does not
# say how its full-rank baselines start.
DENSE_STD = 0.02


@torch.no_grad()
def init_parameters(model: nn.Module, args: LlamaArgs) -> None:
    """Draw every parameter of a model or of a part of one, in fp32 on its device."""
    # Both factors of a low-rank linear have the standard deviation
    #     std = r^(-1/4) · (d_in + d_out)^(-1/4):
    # an entry of BA is a sum of r products, and has √r · std² = (d_in + d_out)^(-1/2). CAAT-Net's
    # private channels start √G times as large: a shared one is the sum of G terms (section 3.2).
    stds: dict[str, float | None] = {}  # None for ones
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, LowRankLinear):
            (rank, d_in), d_out = module.A.weight.shape, module.B.weight.shape[0]
            factor = float(rank**-0.25 * (d_in + d_out) ** -0.25)
            stds |= {f"{prefix}A.weight": factor, f"{prefix}B.weight": factor}
            stds[f"{prefix}gate"] = None
        elif isinstance(module, nn.RMSNorm):
            stds[f"{prefix}weight"] = None
        elif isinstance(module, nn.Linear | nn.Embedding):
            # The factors of a LowRankLinear come after their parent and keep its value.
            stds.setdefault(f"{prefix}weight", DENSE_STD)
    for fqn, parameter in model.named_parameters():
        name, part = clean_name(fqn), local_part(parameter)
        if fqn not in stds:
            want = f"a family of linears with A, B and a gate: nothing says how {name} starts"
            raise ConfigError("model.name", args.model_family.model_name, want)
        # No draw of a shard: on a CPU mesh torch gives every shard the same values.
        digest = hashlib.sha256(f"{args.init_seed}:{name}".encode()).digest()
        generator = torch.Generator(part.device).manual_seed(int.from_bytes(digest[:7], "big"))
        full = torch.empty(parameter.shape, dtype=torch.float32, device=part.device)
        if (std := stds[fqn]) is None:
            full.fill_(1.0)
        else:
            full.normal_(0.0, std, generator=generator)
        if args.lanes > 1 and name.endswith((".wo.weight", ".w2.weight")):
            full[args.shared_channels(len(full)) :] *= args.lanes**0.5
        part.copy_(own_part(parameter, full, {dim: dim for dim in range(full.ndim)}))
