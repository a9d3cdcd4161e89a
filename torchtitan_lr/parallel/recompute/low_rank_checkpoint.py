# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Low-rank activation checkpointing: save r-wide activations, recompute d- and f-wide ones.

A factorised block has seven bottlenecks. From their latents and the block's input, backward
recomputes up-projections, rotary embedding, norms, SwiGLU and attention; no down-projection runs
twice (CoLA-M: CoLA, section 4). Under bottleneck-aware tensor parallelism the latents are saved
after the all-reduce, with the norms' statistics, so that recomputation communicates nothing (BOOST,
section 4). Attention's output and its log-sum-exp can be saved too; then attention does not run
twice.

The model marks the tensors to save, see `torchtitan_lr.models.marks`.
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

from torchtitan_lr.compat.autograd import checkpoint_wrapper
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families.registry import ModelFamily, find_family
from torchtitan_lr.models.marks import mark_in_graphs
from torchtitan_lr.parallel.recompute.mode import CheckpointingMode
from torchtitan_lr.parallel.recompute.replay import Recording
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig


class LowRankCheckpointing(CheckpointingMode):
    """``low_rank``: save the latents, and with ``low_rank_save_attention`` attention's output.

    A block recomputes all up-projections but the last, whose result is the next block's input, and
    everything between them (CoLA, section 4). Under BTP it repeats no collective.
    """

    name = "low_rank"
    low_rank = True
    compiles_on_cpu = True

    def check(self, config: Any) -> None:
        """Require a low-rank family."""
        family = find_family(config.model.name)
        if family is not None and not family.low_rank:
            raise _without_latents(family)

    def apply(self, model: nn.Module, job_config: JobConfig) -> None:
        """Call `apply_low_rank_checkpoint`."""
        section: Any = job_config.activation_checkpoint
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block. Call this after tensor parallelism and before compilation.

    Args:
        model: The whole model or a pipeline stage of it.
        save_attention: Whether to save attention's output (b, s, d/T) and log-sum-exp
            (b, heads/T, s) instead of recomputing attention. Compiled blocks with DTensor
            parameters on a CPU always save them.

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
    """Run a block forward; its backward recomputes everything but the marked tensors.

    Args:
        block: A decoder block.
        *args: Its arguments.
        save_attention: Whether to save the outputs of fused attention as well.
        save_attention_compiled: The same in a compiled graph.
        **kwargs: More of its arguments.
    """
    if torch.compiler.is_compiling():
        # The compiler removes operators whose results are only used by saved tensors.
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
    """Return whether torch's partitioner fails to recompute attention.

    Attention counts as an operator that can draw random numbers. On a CPU its generator's state is
    saved after the DeviceMesh of the DTensor parameters, where AOTAutograd expects tensors
    ("expected all tensors_saved_with_vc_check to be Tensors", seen in torch 2.13 with any
    checkpointing). Saving attention is exact.
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
