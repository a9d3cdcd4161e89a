# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The LLaMA model of every family on one device.

This code is independent of ranks and meshes. It takes head counts and hidden widths from the
tensors, so it also runs on a shard of them: a plan of tensor parallelism changes how weights are
applied (`models.one_device`), and nothing else.

Initial weights depend on the seed and on the parameter's name, and on nothing else. Each parameter
has a random stream of its own, the full tensor is drawn on every rank, and a sharded parameter
keeps its slice: any layout starts from the same weights.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lr.compat.autograd import clean_name
from torchtitan_lr.compat.dtensor import local_part, own_part
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.lanes import Lanes
from torchtitan_lr.models.linears import Gated, LowRankLinear
from torchtitan_lr.models.one_device import Group, OutputProjection, Planned, TokenEmbedding
from torchtitan_lr.titan.base import BlockMask, ModelProtocol, create_attention_mask, flex_attention
from torchtitan_lr.titan.specs import RoPEScalingArgs

# The seven pre-activation latents A x (b, s, r) that LaX passes from block to block: q, k, v, o,
# gate, up, down.
Latents: TypeAlias = tuple[Tensor, ...]
N_ATTENTION_LATENTS = 4  # q, k, v, o

Mask: TypeAlias = Tensor | BlockMask  # which tokens attention sees, see `separate`
PLACES = "places"  # the tokens' places in a batch's inputs, and the model's argument
# Where torch's ``flex_attention`` has a backward pass; on a CPU it has none (2.15).
BLOCK_MASK_DEVICES = ("cuda", "xpu")

# Embedding, head and full-rank linears: N(0, 0.02²), LLaMA's ``initializer_range``. CoLA does not
# say how its full-rank baselines start.
DENSE_STD = 0.02


class Rows(NamedTuple):
    """What attention must know of the rows of a batch: its tokens' places, and what they see."""

    table: Tensor  # rotations by the tokens' places, see `apply_rope`
    mask: Mask | None = None  # of the documents, see `separate`; None is causal
    row_table: Tensor | None = None  # of the whole row, if the tokens are a part of it


class Attend(nn.Module):
    """Rotary positions, and attention of all tokens of a row to those before them."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Any, v: Any, rows: Rows) -> Tensor:
        """Return attention's output (b, h, s, head_dim) of q, k, v (b, s, h · head_dim)."""
        # They are not rotated; k and v have fewer heads if queries are grouped.
        q, k = split_heads(q, self.head_dim, rows.table), split_heads(k, self.head_dim, rows.table)
        return attend(q, k, split_heads(v, self.head_dim), rows.mask)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries; the groups qkv and o."""

    def __init__(self, args: LlamaArgs, first_block: bool) -> None:
        super().__init__()
        d, d_kv, r = args.dim, args.kv_dim, args.rank_attention
        self.head_dim = args.head_dim
        linear = partial(args.model_family.build_linear, args, rank=r, first_block=first_block)
        self.wq, self.wk, self.wv = linear(d, d), linear(d, d_kv), linear(d, d_kv)
        self.wo = linear(d, d)
        self.qkv, self.o = Group(args, "qkv"), Group(args, "o")
        self.attend: nn.Module = Attend(args.head_dim)

    def forward(
        self, x: Tensor, norm: nn.Module, rows: Rows, carried: Latents | None
    ) -> tuple[Tensor, Latents]:
        """Return the update of x (b, s, d), and q, k, v, o latents (none at full rank)."""
        # ``carried`` has the previous block's latents (b, s, r).
        previous, previous_o = carried and carried[:3], carried and carried[3:]
        (q, k, v), latents = self.qkv(x, [self.wq, self.wk, self.wv], norm, previous)
        x = self.attend(q, k, v, rows)  # (b, h, s, head_dim)
        x = x.transpose(1, 2).flatten(2)  # (b, s, h · head_dim)
        (out,), latents_o = self.o(x, [self.wo], None, previous_o)
        return out, (*latents, *latents_o)


class FeedForward(Planned):
    """SwiGLU feed-forward, down(gate · up), with σ on the gate; the groups gate_up and out."""

    def __init__(self, args: LlamaArgs, first_block: bool) -> None:
        super().__init__()
        d, f, r = args.dim, args.ffn_dim, args.rank_ffn
        linear = partial(args.model_family.build_linear, args, rank=r, first_block=first_block)
        self.w1 = linear(d, f)  # gate
        self.w2 = linear(f, d)  # down
        self.w3 = linear(d, f)  # up
        self.gate_up, self.out = Group(args, "gate_up"), Group(args, "down")
        self.low_rank, self.outer_silu = args.low_rank, args.outer_silu

    def forward(
        self, x: Tensor, norm: nn.Module, carried: Latents | None
    ) -> tuple[Tensor, Latents]:
        """Return the update of x (b, s, d), and gate, up, down latents (none at full rank)."""
        previous, previous_down = carried and carried[:2], carried and carried[2:]
        (gate, up), latents = self.gate_up(x, [self.w1, self.w3], norm, previous)
        factors = Gated(gate, up, self.outer_silu)  # (b, s, f)
        keeps = self.low_rank and self.plan.keeps_factors
        hidden = factors if keeps else factors.product()
        (out,), latents_down = self.out(hidden, [self.w2], None, previous_down)
        return out, (*latents, *latents_down)


class TransformerBlock(nn.Module):
    """One decoder block."""

    def __init__(self, layer_id: int, args: LlamaArgs) -> None:
        super().__init__()
        self.carries_latents = args.model_family.carries_latents
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, first_block=layer_id == 0)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args, first_block=layer_id == 0)

    def forward(
        self, x: Tensor, rows: Rows, carried: Latents | None = None
    ) -> tuple[Tensor, Latents | None]:
        """Return the stream (b, s, d), with lanes (b, s, G, d), and the seven latents for LaX."""
        # ``carried`` has the previous block's latents; None in the first block and in other
        # families.
        n = N_ATTENTION_LATENTS
        update, latents_attention = self.attention(
            x, self.attention_norm, rows, carried and carried[:n]
        )
        x = x + update
        update, latents_ffn = self.feed_forward(x, self.ffn_norm, carried and carried[n:])
        x = x + update
        return x, ((*latents_attention, *latents_ffn) if self.carries_latents else None)


class LlamaModel(ModelProtocol):
    """LLaMA of any family, or the part of a pipeline stage that ``pipeline_llm`` leaves."""

    freqs_cis: Tensor

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        model_args.check()
        self.model_args = model_args
        dim, vocab_size = model_args.dim, model_args.vocab_size
        self.tok_embeddings: nn.Module | None = TokenEmbedding(vocab_size, dim)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(i, model_args) for i in range(model_args.n_layers)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(dim, eps=model_args.norm_eps)
        self.output: nn.Module | None = OutputProjection(dim, vocab_size, bias=False)
        if model_args.lanes > 1:
            Lanes(model_args).take_over(self)
        self.register_buffer("freqs_cis", self._build_freqs_cis(), persistent=False)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw the initial weights and fill the rotary table."""
        with torch.device(buffer_device or self.freqs_cis.device):
            self.freqs_cis = self._build_freqs_cis()
        init_parameters(self, self.model_args)

    def forward(
        self,
        tokens: Tensor,  # (b, s); in a later pipeline stage the residual stream (b, s, d)
        *carried: Tensor,  # LaX in a later pipeline stage: seven latents of the stage before
        documents: Tensor | None = None,  # index of each token's document (b, s), see `separate`
        places: Tensor | None = None,  # of the tokens (b, s), if they are a part of longer rows
        targets: Tensor | None = None,  # token ids (b, s) whose log-probabilities are summed
    ) -> Tensor | tuple[Tensor, ...]:
        """Predict the next token at every position: return logits (b, s, V), or a loss."""
        # An earlier pipeline stage returns the stream (b, s, d), with lanes (b, s, G, d), for LaX
        # followed by the last block's latents.
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        latents: Latents | None = carried or None
        rows = self._rows(documents, places, x.dtype)
        for block in self.layers.values():
            x, latents = block(x, rows, latents)
        if self.output is not None:
            out: Tensor = self.output(x, self.norm, targets)
            return out
        return x if latents is None else (x, *latents)

    def _rows(self, documents: Tensor | None, places: Tensor | None, dtype: torch.dtype) -> Rows:
        table, mask = torch.view_as_real(self.freqs_cis), None
        if documents is not None:
            positions, mask = separate(documents, dtype, places)
            table = table[positions]  # (b, s, head_dim / 2, 2)
        if places is None:
            return Rows(table, mask)
        row_table = table
        if documents is None:
            return Rows(row_table[places], mask, row_table)
        row = torch.arange(len(places), device=places.device)[:, None]
        return Rows(row_table[row, places], mask, row_table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LlamaModel":
        # A cast would round the rotary table (or drop its imaginary part), and materializing a
        # meta model would leave it unfilled: so the table is rebuilt, not converted.
        device = fn(torch.empty(0, device=self.freqs_cis.device)).device
        self.freqs_cis = None  # type: ignore[assignment]
        super()._apply(fn, recurse)
        with torch.device(device):
            self.freqs_cis = self._build_freqs_cis()
        return self

    def _build_freqs_cis(self) -> Tensor:
        args = self.model_args
        parameter = next(self.parameters(), None)
        # Half precision would round the angles; weights in fp64 deserve a table in fp64.
        dtype = torch.float32 if parameter is None else parameter.dtype
        dtype = torch.promote_types(dtype, torch.float32)
        shape = args.head_dim, args.max_seq_len
        return build_freqs_cis(*shape, args.rope_theta, args.rope_scaling, dtype)


def split_heads(x: Tensor, head_dim: int, table: Tensor | None = None) -> Tensor:
    """Return the heads (b, h, s, head_dim) of x (b, s, h · head_dim), rotated by a table if any."""
    heads = x.unflatten(-1, (-1, head_dim))  # (b, s, h, head_dim)
    if table is not None:
        heads = apply_rope(heads, table)
    return heads.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Return attention's output (b, h, s, head_dim) of q, likewise, and k, v (b, h_kv, ...)."""
    # Without the mask of the documents (`separate`) attention is causal.
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        out: Tensor = flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        return out
    # Called directly, so that a caller's ``sdpa_kernel`` context chooses the kernel.
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    )


def separate(
    documents: Tensor,  # index of each token's document (b, s), different for all of a row
    dtype: torch.dtype,
    places: Tensor | None = None,  # of the tokens that attend (b, q); None for all s
) -> tuple[Tensor, Mask]:
    """Return the positions of tokens in their documents (b, s), and the mask of attention."""
    # A token attends to the earlier tokens of its own document. The first token of a row begins a
    # document. The mask is the blocks of 128 × 128 scores that ``flex_attention`` computes, without
    # memory of s²; on a CPU, what is added to the scores (b, 1, q, s) in ``dtype``: 0 or -inf.
    b, s = documents.shape
    keys = torch.arange(s, device=documents.device).expand_as(documents)
    first = torch.ones_like(documents[:, :1], dtype=torch.bool)
    begins = torch.cat([first, documents[:, 1:] != documents[:, :-1]], dim=1)
    positions = keys - torch.where(begins, keys, 0).cummax(dim=1).values
    queries = keys if places is None else places
    q = queries.shape[1]

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if places is None else places[row, query]
        return (query >= key) & (documents[row, query] == documents[row, key])

    if documents.device.type in BLOCK_MASK_DEVICES:
        return positions, create_attention_mask(is_seen, b, None, q, s, device=documents.device)
    owners = documents.gather(1, queries)
    seen = owners[:, :, None] == documents[:, None, :]
    seen &= queries[:, :, None] >= keys[:, None, :]
    mask = torch.zeros(seen.shape, dtype=dtype, device=documents.device)
    return positions, mask.masked_fill_(~seen, float("-inf"))[:, None]


def build_freqs_cis(
    head_dim: int,
    seq_len: int,
    theta: float,
    scaling: RoPEScalingArgs | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return exp(i · position · frequency) (RoFormer, section 3.2.2), (seq_len, head_dim / 2)."""
    # The pairs of a head are neighbours, (x0, x1), (x2, x3), ...: Meta's convention. Hugging Face
    # pairs the two halves of a head instead. Under Llama 3.1's scaling, pairs that turn often
    # within the original context keep their frequency, those that turn rarely have it divided by
    # the factor, and the ones between are interpolated linearly in the number of turns.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = torch.pow(theta, -exponents)  # radians per position
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        unscaled = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        frequencies = frequencies * (unscaled + (1 - unscaled) / scaling.scaling_factor)
    positions = torch.arange(seq_len, dtype=torch.float64, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    return torch.complex(angles.cos().to(dtype), angles.sin().to(dtype))


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate every pair of x (b, s, h, head_dim) by its position's angle, in fp32 or better."""
    # The table has cosines and sines (s' >= s, head_dim / 2, 2), for rows with different positions
    # (b, s, head_dim / 2, 2); or it is that of `build_freqs_cis`.
    table = torch.view_as_real(table) if table.is_complex() else table
    # ([b,] s, 1, head_dim / 2, 2)
    table = table[:, :, None] if table.dim() == 4 else table[: x.shape[1], None]
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    # Real arithmetic, (x0 cos - x1 sin, x0 sin + x1 cos), is fused by the compiler with its
    # neighbours. Eagerly a product of complex numbers is one kernel instead of eight.
    if torch.compiler.is_compiling():
        (cos, sin), (even, odd) = table.unbind(-1), pairs.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    # The view needs pairs side by side; a slice of a wider tensor may have them elsewhere.
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(table)
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)


def loss_arguments(model: nn.Module, labels: Tensor) -> dict[str, Tensor]:
    """Return the model's arguments for the loss: ``targets`` (b, s) for a model of this package."""
    return {"targets": labels} if isinstance(model, LlamaModel) else {}


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
