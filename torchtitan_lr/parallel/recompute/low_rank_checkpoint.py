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
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_lr.compat.autograd import checkpoint_wrapper
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families.registry import ModelFamily, find_family
from torchtitan_lr.models.marks import mark_in_graphs
from torchtitan_lr.parallel.recompute.mode import BlockFlops, CheckpointingMode
from torchtitan_lr.parallel.recompute.replay import Recording


class LowRankCheckpointing(CheckpointingMode):
    """``low_rank``: keep the latents, and attention's output where the configuration says so.

    A block repeats its up-projections but for the last, whose result is the next block's input, and
    what lies between them (CoLA, section 4). Under BTP it repeats no collective.
    """

    name = "low_rank"
    low_rank = True
    compiles_on_cpu = True

    def check(self, config: Any) -> None:
        """It needs latents."""
        family = find_family(config.model.name)
        if family is not None and not family.low_rank:
            raise _without_latents(family)

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """As `apply_low_rank_checkpoint`."""
        section: Any = job_config.activation_checkpoint
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)

    def repeated_flops(self, section: Any, block: BlockFlops) -> float:
        """The up-projections; attention too unless its output is kept."""
        if section.low_rank_save_attention:
            return block.up_projections
        return block.up_projections + block.attention_scores


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block; call after tensor parallelism and before compilation.

    Args:
        model: The whole model or a pipeline stage of it.
        save_attention: Whether to keep attention's output (b, s, d/T) and log-sum-exp
            (b, heads/T, s) instead of running attention again. Compiled blocks with DTensor
            parameters on a CPU keep them in any case.

    Raises:
        ConfigError: For a model without bottlenecks.
    """
    family = cast(LlamaArgs, model.model_args).model_family
    if not family.low_rank:
        raise _without_latents(family)
    mark_in_graphs()
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        wrapped = checkpoint_wrapper(
            block,
            checkpoint_fn=checkpoint_block,
            save_attention=save_attention,
            save_attention_compiled=save_attention or _cannot_repeat_attention_compiled(model),
        )
        layers.register_module(name, wrapped)
    logger.info(
        "Applied low-rank activation checkpointing, attention's output is %s",
        "kept" if save_attention else "recomputed",
    )


def checkpoint_block(
    block: nn.Module,
    *args: Any,
    save_attention: bool,
    save_attention_compiled: bool,
    **kwargs: Any,
) -> Any:
    """Run a block forward such that backward recomputes all but the marked tensors.

    Args:
        block: A decoder block.
        *args: Its arguments.
        save_attention: Whether what fused attention returns is kept as well.
        save_attention_compiled: The same in a compiled graph.
        **kwargs: More of its arguments.
    """
    if torch.compiler.is_compiling():
        # The compiler drops by itself what leads only to kept tensors.
        contexts = _contexts_saving_attention if save_attention_compiled else _contexts
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


def _without_latents(family: ModelFamily) -> ConfigError:
    want = f"another mode for {family.model_name}, which has no low-rank activations"
    return ConfigError("activation_checkpoint.mode", LowRankCheckpointing.name, want)


def _cannot_repeat_attention_compiled(model: nn.Module) -> bool:
    """Whether torch's partitioner fails to repeat an operator that could draw random numbers.

    Attention counts as one. On a CPU its generator's state is saved behind the DeviceMesh of the
    DTensor parameters, where AOTAutograd expects tensors ("expected all tensors_saved_with_vc_check
    to be Tensors", seen in torch 2.13 with any checkpointing). Keeping attention is exact.
    """
    return any(
        isinstance(p, DTensor) and p.device_mesh.device_type == "cpu" for p in model.parameters()
    )


def _policy(kept: frozenset[Any], context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    kept = frozenset({torch.ops.torchtitan_lr.keep.default})
    return create_selective_checkpoint_contexts(partial(_policy, kept))


def _contexts_saving_attention() -> Any:
    kept = ATTENTION_OPERATORS | {torch.ops.torchtitan_lr.keep.default}
    return create_selective_checkpoint_contexts(partial(_policy, kept))
