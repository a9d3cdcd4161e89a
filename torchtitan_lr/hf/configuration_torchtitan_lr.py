# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Configuration of an exported low-rank LLaMA. Needs transformers only."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linears of a block."""


class TorchtitanLRConfig(PretrainedConfig):
    """Shape and kind of the model.

    Args:
        family: What a linear is: ``full`` W, ``svd`` B A, ``cola`` B σ(A ·), ``lax`` the same with
            the previous block's latent added in front of σ.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width d of the residual stream.
        intermediate_size: Hidden width f of the SwiGLU.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key and value heads.
        max_position_embeddings: Length of the sequences that the model was trained on.
        rms_norm_eps: Added to the mean square in every norm.
        rotary_base: Base of the rotary frequencies.
        rotary_scaling: Llama 3.1's scaling of them: ``factor``, ``low_freq_factor``,
            ``high_freq_factor``, ``original_max_position_embeddings``; None for no scaling.
        rank_attention: Rank of q, k, v, o; 0 at full rank.
        rank_ffn: Rank of gate, up, down; 0 at full rank.
        latent_silu: The projections with σ = SiLU in their bottleneck.
        outer_silu: Whether the gate of the SwiGLU has its own SiLU.
        lax_gate: ``identity``, or ``scalar`` for a learned factor on the carried latent.
        lanes: Number G of CAAT-Net's streams; 1 is an ordinary model.
        sync_fraction: Share of the channels that all lanes sum, the first int(p · width).
        initializer_range: Standard deviation of new weights.
        use_cache: Whether to return keys and values.
        **kwargs: Arguments of every configuration of transformers.
    """

    model_type = "torchtitan_lr"
    _auto_class = "AutoConfig"  # save_pretrained copies the code for it
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    def __init__(
        self,
        family: str = "cola",
        vocab_size: int = 32000,
        hidden_size: int = 256,
        intermediate_size: int = 688,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        max_position_embeddings: int = 2048,
        rms_norm_eps: float = 1e-6,
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, float] | None = None,
        rank_attention: int = 64,
        rank_ffn: int = 64,
        latent_silu: tuple[str, ...] | list[str] = PROJECTIONS,
        outer_silu: bool = True,
        lax_gate: str = "identity",
        lanes: int = 1,
        sync_fraction: float = 1.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.family = family
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        self.rank_attention = rank_attention
        self.rank_ffn = rank_ffn
        self.latent_silu = list(latent_silu)
        self.outer_silu = outer_silu
        self.lax_gate = lax_gate
        self.lanes = lanes
        self.sync_fraction = sync_fraction
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def shared_channels(self, width: int) -> int:
        """Return how many of ``width`` channels the lanes sum: the first int(p · width)."""
        return int(width * self.sync_fraction)
