# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank activation checkpointing: keep what is r-wide, recompute what is d- or f-wide.

A factorised block passes through seven bottlenecks. Keeping the seven latents and the block's input
is enough to make everything else again with the up-projections, rotary embedding, norms, SwiGLU and
attention; no down-projection runs twice (CoLA-M: CoLA, section 4). Under bottleneck-aware tensor
parallelism the latents are kept as the all-reduce left them, with the norms' statistics, so that
recomputation exchanges nothing (BOOST, section 4). Attention's output and its log-sum-exp can be
kept too, which spares attention from being repeated.

The tensors to keep are marked where they are made, see `torchtitan_lr.models.marks`.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.marks import mark_in_graphs
from torchtitan_lr.parallel.recompute import Recording

ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""The fused attention kernels: they return what their backward needs, output and log-sum-exp.

The unfused one (``SDPBackend.MATH``) needs the s × s probabilities; it is always repeated.
"""


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block; call after tensor parallelism and before compilation.

    Args:
        model: The whole model or a pipeline stage of it.
        save_attention: Whether to keep attention's output (b, s, d/T) and log-sum-exp
            (b, heads/T, s) instead of running attention again.

    Raises:
        ConfigError: For a model without bottlenecks.
    """
    if not getattr(model, "model_args").low_rank:  # noqa: B009
        want = "another mode for llama_full, which has no low-rank activations"
        raise ConfigError("activation_checkpoint.mode", "low_rank", want)
    mark_in_graphs()
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        run = checkpoint_block_saving_attention if save_attention else checkpoint_block
        layers.register_module(name, checkpoint_wrapper(block, checkpoint_fn=run))


def checkpoint_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block forward such that backward recomputes all but the marked tensors."""
    return _checkpoint(block, args, kwargs, save_attention=False)


def checkpoint_block_saving_attention(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block as `checkpoint_block`, and keep what fused attention returns as well."""
    return _checkpoint(block, args, kwargs, save_attention=True)


def _checkpoint(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], save_attention: bool
) -> Any:
    if torch.compiler.is_compiling():
        # The compiler drops by itself what leads only to kept tensors.
        contexts = _contexts_saving_attention if save_attention else _contexts
        return checkpoint(
            block,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    operators = ATTENTION_OPERATORS if save_attention else frozenset()
    return Recording(block, args, kwargs, operators).forward()


def _policy(kept: frozenset[Any], context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    kept = frozenset({torch.ops.torchtitan_lr.keep.default})
    return create_selective_checkpoint_contexts(partial(_policy, kept))


def _contexts_saving_attention() -> Any:
    kept = ATTENTION_OPERATORS | {torch.ops.torchtitan_lr.keep.default}
    return create_selective_checkpoint_contexts(partial(_policy, kept))
