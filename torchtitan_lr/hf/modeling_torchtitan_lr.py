# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""transformers' LLaMA with other linears: svd, CoLA, LaX, and models with CAAT-Net's lanes.

Needs torch and transformers only. Attention, masks, caches, positions, loss and generation are
transformers' own. Shapes below: batch b, tokens s, width d, rank r, lanes G.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.utils import can_return_tuple

# Key of ``config.json`` for what the model has beside LLaMA: family, activation, ranks, lanes.
NAME = "torchtitan_lr"

LINEARS = (  # of a block
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


class LowRankLinear(nn.Module):
    """B σ(A x + g · carried); σ, the carried latent and its factor g where the model has them."""

    def __init__(
        self, d_in: int, d_out: int, rank: int, silu: bool, carries: bool, gated: bool
    ) -> None:
        super().__init__()
        self.rank, self.silu, self.carries = rank, silu, carries
        self.A, self.B = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
        self.gate = nn.Parameter(torch.ones(1)) if gated else None
        self.carried: Tensor | None = None  # (b, s, r), of the block before
        self.latent: Tensor | None = None  # (b, s, r), for the next block

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, s, d_in) to (b, s, d_out)."""
        mixed = self.A(x)
        if self.carries:
            self.latent = mixed
        if self.carried is not None:
            mixed = mixed + (self.carried if self.gate is None else self.gate * self.carried)
        return self.B(F.silu(mixed) if self.silu else mixed)


class LaneRows(nn.Linear):
    """Maps each lane by its own rows of W: (b, s, G · d_in) to (b, s, d_out), lane after lane."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply W (d_out, d_in)."""
        lanes = x.unflatten(-1, (-1, self.in_features))
        weight = self.weight.unflatten(0, (lanes.shape[2], -1))
        return torch.einsum("bsgi,goi->bsgo", lanes, weight).flatten(2)


class LaneTerms(nn.Linear):
    """Maps each lane by its own columns of W: (b, s, d_in) to (b, s, G · d_out).

    The first ``shared`` channels are summed over the lanes: CAAT-Net's partial reduction, equations
    8 and 12.
    """

    def __init__(self, d_in: int, d_out: int, lanes: int, shared: int) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.lanes, self.shared = lanes, shared

    def forward(self, x: Tensor) -> Tensor:
        """Apply W (d_out, d_in)."""
        weight = self.weight.unflatten(1, (self.lanes, -1))
        terms = torch.einsum("bsgi,ogi->bsgo", x.unflatten(-1, (self.lanes, -1)), weight)
        # Half precision is added up in fp32 and rounded once.
        wide = torch.promote_types(x.dtype, torch.float32)
        total = terms[..., : self.shared].sum(2, keepdim=True, dtype=wide).to(x.dtype)
        total = total.expand(-1, -1, self.lanes, -1)
        return torch.cat((total, terms[..., self.shared :]), dim=-1).flatten(2)


class LaneRMSNorm(LlamaRMSNorm):
    """Normalizes each lane of x (b, s, G · d)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the norm."""
        return super().forward(x.unflatten(-1, (-1, len(self.weight)))).flatten(2)


class Block(LlamaDecoderLayer):
    """LLaMA's block with other linears.

    LaX hands the latents of its seven linears to the next block, behind the residual stream: what
    crosses a block's border is one tensor, so that checkpointing and pipelines need not know.
    """

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer)
        own = getattr(config, NAME)
        self.lanes, self.carries = own["lanes"], own["family"] == "lax"
        self.is_last = layer == config.num_hidden_layers - 1
        gated = self.carries and own["lax_gate"] == "scalar" and layer > 0
        for name in LINEARS:
            dense: Any = self.get_submodule(name)
            d_in, d_out = dense.in_features, dense.out_features
            if own["family"] != "full":
                rank = own["rank_attention"] if name.startswith("self_attn") else own["rank_ffn"]
                silu = own["activation"] in ("both", "lowrank")
                silu = silu or (own["activation"] == "reduced" and name == "mlp.gate_proj")
                linear: nn.Module = LowRankLinear(d_in, d_out, rank, silu, self.carries, gated)
            elif name in ("self_attn.o_proj", "mlp.down_proj"):
                linear = LaneTerms(d_in, d_out, self.lanes, int(own["sync_fraction"] * d_out))
            else:
                linear = LaneRows(d_in, d_out, bias=False)
            self.set_submodule(name, linear)
        if own["family"] != "full" and own["activation"] not in ("both", "fullrank"):
            self.mlp.act_fn = nn.Identity()
        if self.lanes > 1:
            d, eps = config.hidden_size, config.rms_norm_eps
            self.input_layernorm = LaneRMSNorm(d, eps)
            self.post_attention_layernorm = LaneRMSNorm(d, eps)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run LLaMA's block on (b, s, d), with LaX's seven latents behind, or on (b, s, G · d)."""
        if not self.carries:
            if hidden_states.shape[-1] == self.hidden_size:  # lanes start with the same vectors
                hidden_states = hidden_states.repeat(1, 1, self.lanes)
            return super().forward(hidden_states, *args, **kwargs)
        linears: list[Any] = [self.get_submodule(name) for name in LINEARS]
        x, carried = hidden_states, [None] * len(linears)
        if x.shape[-1] > self.hidden_size:
            ranks = [linear.rank for linear in linears]
            x, *carried = hidden_states.split([self.hidden_size, *ranks], dim=-1)
        for linear, latent in zip(linears, carried, strict=True):
            linear.carried = latent
        x = super().forward(x, *args, **kwargs)
        latents = [linear.latent for linear in linears]
        for linear in linears:
            linear.carried = linear.latent = None  # a graph is not kept
        return x if self.is_last else torch.cat((x, *latents), dim=-1)


class TorchtitanLRForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM with the linears that ``config.torchtitan_lr`` describes."""

    _auto_class = "AutoModelForCausalLM"  # save_pretrained copies the code for it
    # What names LLaMA's own modules does not fit: plans, and libraries that go by `model_type`.
    _tp_plan = _pp_plan = None

    def __init__(self, config: LlamaConfig) -> None:
        config.base_model_tp_plan = config.base_model_pp_plan = None
        config.model_type = NAME
        # `hidden_act` in the file refuses LlamaForCausalLM, which would draw the linears anew.
        stated, config.hidden_act = config.hidden_act, "silu"
        super().__init__(config)
        d, lanes = config.hidden_size, getattr(config, NAME)["lanes"]
        self.model.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        if lanes > 1:
            self.model.norm = LaneRMSNorm(d, config.rms_norm_eps)
            self.lm_head = LaneRows(d, config.vocab_size, bias=False)
        config.hidden_act = stated
        self.post_init()
        self._no_split_modules = {"Block"}

    @can_return_tuple
    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run LLaMA; of LaX, hidden states are returned without the latents."""
        out = super().forward(*args, **kwargs)
        if out.hidden_states is not None and getattr(self.config, NAME)["family"] == "lax":
            d = self.config.hidden_size
            out["hidden_states"] = tuple(state[..., :d] for state in out.hidden_states)
        return out
