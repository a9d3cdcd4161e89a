# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A low-rank LLaMA for transformers: svd, CoLA, LaX, and models with CAAT-Net's lanes.

Needs torch and transformers only. Weights have the names and the layout that they were trained
with: neighbouring channels of a head are rotated together. Shapes below: batch b, tokens s, width
d, rank r, lanes G.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_torchtitan_lr import TorchtitanLRConfig
from .layers_torchtitan_lr import (
    CausalMask,
    LaneRows,
    LowRankLinear,
    apply_linear,
    build_linear,
    build_rotations,
    rotate,
)

N_ATTENTION = 4
"""How many of a block's seven linears (q, k, v, o, gate, up, down) attention has."""

OUTPUTS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if "cache" in OUTPUTS else "past_key_values"
"""What transformers calls keys and values of earlier tokens: ``cache`` since 5.24."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: TorchtitanLRConfig, layer: int) -> None:
        super().__init__()
        d, first = config.hidden_size, layer == 0
        self.layer, self.head_dim = layer, config.head_dim
        d_kv = config.num_key_value_heads * config.head_dim
        self.wq = build_linear(config, "q", d, d, first)
        self.wk = build_linear(config, "k", d, d_kv, first)
        self.wv = build_linear(config, "v", d, d_kv, first)
        self.wo = build_linear(config, "o", d, d, first)

    def forward(
        self,
        x: Tensor,
        rotations: Tensor,
        mask: CausalMask,
        cache: Cache | None,
        carried: tuple[Tensor, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """Attend from x (b, s, d) or (b, s, G, d); give the update and the latents."""
        latents: list[Tensor] = []
        previous = carried or (None,) * N_ATTENTION
        q, k, v = (
            apply_linear(linear, x, latent, latents).unflatten(-1, (-1, self.head_dim))
            for linear, latent in zip((self.wq, self.wk, self.wv), previous[:3], strict=True)
        )
        q, k = rotate(q, rotations).transpose(1, 2), rotate(k, rotations).transpose(1, 2)
        v = v.transpose(1, 2)  # (b, h, s, head_dim)
        if cache is not None:
            # Preallocated caches of transformers before version 5 want to know where.
            k, v = cache.update(k, v, self.layer, {"cache_position": mask.slots(k.device)})
        seen, causal = mask(k.shape[-2], q.device)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=grouped
        )
        out = out.transpose(1, 2).flatten(2)
        return apply_linear(self.wo, out, previous[-1], latents), latents


class FeedForward(nn.Module):
    """SwiGLU: down(gate * up), with SiLU on the gate where the model has it."""

    def __init__(self, config: TorchtitanLRConfig, layer: int) -> None:
        super().__init__()
        d, f, first = config.hidden_size, config.intermediate_size, layer == 0
        self.outer_silu = config.outer_silu
        self.w1 = build_linear(config, "gate", d, f, first)
        self.w3 = build_linear(config, "up", d, f, first)
        self.w2 = build_linear(config, "down", f, d, first)

    def forward(self, x: Tensor, carried: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Transform x (b, s, d) or (b, s, G, d); give the update and the latents."""
        latents: list[Tensor] = []
        of_gate, of_up, of_down = carried or (None, None, None)
        gate = apply_linear(self.w1, x, of_gate, latents)
        up = apply_linear(self.w3, x, of_up, latents)
        hidden = (F.silu(gate) if self.outer_silu else gate) * up
        return apply_linear(self.w2, hidden, of_down, latents), latents


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, config: TorchtitanLRConfig, layer: int) -> None:
        super().__init__()
        self.carries = config.family == "lax"
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = nn.RMSNorm(d, eps=eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = nn.RMSNorm(d, eps=eps)
        self.feed_forward = FeedForward(config, layer)

    def forward(
        self,
        x: Tensor,
        rotations: Tensor,
        mask: CausalMask,
        cache: Cache | None,
        *carried: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the block.

        A latent belongs to its token alone: with cached keys and values, those of the new tokens
        are all that LaX needs from the block before.

        Args:
            x: Residual stream (b, s, d); with lanes at full rank (b, s, G, d).
            rotations: Cosines and sines (b or 1, s, 1, head_dim / 2, 2).
            mask: What a query sees.
            cache: Keys and values of earlier tokens, or None.
            *carried: LaX: the previous block's seven latents (b, s, r); none in the first block.

        Returns:
            The residual stream, for LaX followed by this block's latents.
        """
        update, latents = self.attention(
            self.attention_norm(x), rotations, mask, cache, carried[:N_ATTENTION]
        )
        x = x + update
        update, more = self.feed_forward(self.ffn_norm(x), carried[N_ATTENTION:])
        x = x + update
        return (x, *latents, *more) if self.carries else (x,)


def next_token_loss(logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
    """Mean loss of the next token, nats, in fp32 at least.

    Args:
        logits: (b, s, V).
        labels: Token ids (b, s), not shifted; -100 where there is no loss.
        count: What the sum is divided by; by default the number of counted labels.
    """
    logits = logits[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten().to(logits.device)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    if isinstance(count, Tensor):
        count = count.to(total.device)
    return total / ((labels != -100).sum() if count is None else count)


class TorchtitanLRForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, blocks, final norm and head, for ``AutoModelForCausalLM``.

    Args:
        config: The model's configuration.
    """

    config_class = TorchtitanLRConfig
    _auto_class = "AutoModelForCausalLM"  # save_pretrained copies the code for it
    accepts_loss_kwargs = True
    base_model_prefix = ""
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = True
    _supports_static_cache = True
    supports_gradient_checkpointing = True

    def __init__(self, config: TorchtitanLRConfig) -> None:
        super().__init__(config)
        self.streams = config.lanes
        self.tok_embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        head = LaneRows if self.streams > 1 else nn.Linear
        self.output: nn.Module = head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.tok_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.tok_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.output = new_embeddings

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            module.weight.data.fill_(1.0)
        elif isinstance(module, LowRankLinear) and module.gate is not None:
            module.gate.data.fill_(1.0)

    def _run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
    ) -> tuple[Tensor, list[Tensor], Cache | None]:
        """Give the normed hidden state, every block's input, and the cache.

        The hidden state is (b, s, d), with lanes at full rank (b, s, G, d). For the arguments see
        `forward`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected either input_ids or inputs_embeds")
        x = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            use_cache, cache = False, None  # a block that runs twice would cache twice
        elif use_cache and cache is None:
            cache = DynamicCache()
        tokens = x.shape[1]
        past = 0 if cache is None else int(cache.get_seq_length())
        mask = CausalMask(attention_mask, past, tokens)
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens, device=x.device)[None]
            if attention_mask is not None and attention_mask.ndim == 2:
                counted = attention_mask.long().cumsum(-1) - 1
                position_ids = counted.clamp(min=0)[:, past : past + tokens]
        rotations = build_rotations(self.config, position_ids.to(x.device), x.dtype)
        if self.streams > 1:
            x = x.unsqueeze(2).expand(-1, -1, self.streams, -1)
        carried: tuple[Tensor, ...] = ()
        states = []
        for block in self.layers:
            states.append(x)
            arguments = (x, rotations, mask, cache, *carried)
            if self.gradient_checkpointing and self.training:
                x, *rest = self._gradient_checkpointing_func(block.__call__, *arguments)
            else:
                x, *rest = block(*arguments)
            carried = tuple(rest)
        return self.norm(x), states, cache if use_cache else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Predict the next token at every position.

        Args:
            input_ids: Token ids (b, s).
            attention_mask: 1 for tokens and 0 for padding, (b, cached + s).
            position_ids: (b or 1, s); by default counted along the attention mask, so that padding
                has no part in it.
            past_key_values: Keys and values of earlier tokens, for transformers before 5.24.
            inputs_embeds: Embeddings (b, s, d) in place of token ids.
            labels: Token ids (b, s), not shifted; -100 where there is no loss.
            use_cache: Whether to return keys and values; by default outside of training.
            output_hidden_states: Whether to return every block's input and the normed output of
                the last one, (b, s, d), with lanes at full rank (b, s, G, d).
            return_dict: False for a tuple.
            logits_to_keep: How many of the last positions get logits; 0 for all.
            num_items_in_batch: What the summed loss is divided by; by default its labels' number.
            cache: Keys and values of earlier tokens; transformers has this name since 5.24.
            **kwargs: Ignored.

        Returns:
            Loss, logits (b, s, V), cache and hidden states.
        """
        cache = past_key_values if cache is None else cache
        hidden, states, cache = self._run(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache
        )
        logits = self.output(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None if labels is None else next_token_loss(logits, labels, num_items_in_batch)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            **{CACHE_NAME: cache},
        )
        return out.to_tuple() if return_dict is False else out
