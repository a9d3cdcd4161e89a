# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Activation checkpointing: torchtitan's modes, and ``low_rank``.

``low_rank`` saves r-wide activations and recomputes d- and f-wide ones. A factorised block has
seven bottlenecks. From their latents and the block's input, backward recomputes up-projections,
rotary embedding, norms, SwiGLU and attention; no down-projection runs twice (CoLA-M: CoLA, section
4). Under bottleneck-aware tensor parallelism the latents are saved after the all-reduce, with the
norms' statistics, so that recomputation communicates nothing (BOOST, section 4). Attention's output
and its log-sum-exp can be saved too; then attention does not run twice.

The edges name what is saved, see `torchtitan_lr.models.marks`. The memory and the repeated
collectives of a mode are stated nowhere: the estimator measures them on wrapped blocks.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_lr.compat.autograd import checkpoint_wrapper
from torchtitan_lr.compat.dispatch import ATTENTION_OPERATORS, tree_map
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import ModelFamily, find_family
from torchtitan_lr.models.marks import Tape, mark_in_graphs
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, apply_ac, count_checkpointed_blocks_from

SELECTIVE_SAVE_LIST = {torch.ops.aten.mm.default, *ATTENTION_OPERATORS}
"""Operators with outputs that ``selective_ac_option = "op"`` saves: the expensive ones.

torchtitan saves every second matmul as well. Its own list lacks attention on the CPU.
"""


@dataclass(frozen=True)
class CheckpointingMode:
    """A mode of activation checkpointing: which activations backward recomputes.

    Attributes:
        name: The value of ``activation_checkpoint.mode``.
        recomputes: Whether anything is recomputed.
        eager: Whether wrapped blocks recompute. Otherwise the compiler does, and the estimator
            cannot measure it: ``memory_budget`` counts as a share of the way from ``full`` to
            ``none``.
        low_rank: Whether it needs a low-rank model. Comparisons with full rank use ``full``
            instead.
        compiles_on_cpu: Whether torch can compile tensor-parallel blocks in this mode on a CPU.
            Torch 2.13 cannot if attention is recomputed.
    """

    name: str
    recomputes: bool = True
    eager: bool = True
    low_rank: bool = False
    compiles_on_cpu: bool = False


MODES = {
    mode.name: mode
    for mode in (
        CheckpointingMode("none", recomputes=False, compiles_on_cpu=True),
        CheckpointingMode("selective"),
        CheckpointingMode("full"),
        CheckpointingMode("low_rank", low_rank=True, compiles_on_cpu=True),
        CheckpointingMode("memory_budget", eager=False),
    )
}
"""Modes by name, those of `config.schema.AC_MODES`."""


def check_mode(config: Any) -> None:
    """Refuse a mode that the configuration cannot have.

    Raises:
        ConfigError: With one line that names the key.
    """
    mode = config.activation_checkpoint.mode
    family = find_family(config.model.name)
    if MODES[mode].low_rank and family is not None and not family.low_rank:
        raise _without_latents(family)
    if MODES[mode].eager:
        return
    if not compiles_model(config):
        want = "'selective', 'full' or 'none' unless compile.enable with the component 'model'"
        raise ConfigError("activation_checkpoint.mode", mode, want)
    budget = config.activation_checkpoint.memory_budget
    if not 0 <= budget <= 1:
        raise ConfigError("activation_checkpoint.memory_budget", budget, "a number from 0 to 1")


def wrapping_period(section: Any, mode: str) -> int:
    """Return the number of blocks after which the pattern of wrapped blocks repeats.

    ``selective`` wraps every n-th block, or recomputes cheap operators of all blocks (``op``).
    """
    option = section.selective_ac_option
    return int(option) if mode == "selective" and option.isdecimal() else 1


def compiles_model(job_config: Any) -> bool:
    """Return whether ``[compile]`` enables the compilation of decoder blocks."""
    return bool(job_config.compile.enable and "model" in job_config.compile.components)


def apply_activation_checkpoint(model: nn.Module, job_config: JobConfig) -> None:
    """Wrap decoder blocks in the mode of ``[activation_checkpoint]``.

    Args:
        model: After tensor parallelism and before compilation; the whole model or a pipeline stage
            of it.
        job_config: The run's configuration. An estimate passes only the sections
            ``activation_checkpoint``, ``compile`` and ``job``.
    """
    section: Any = job_config.activation_checkpoint
    if section.mode == "none":
        return
    if section.mode == "low_rank":
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)
        return
    # "2" wraps every second block, counted over the whole model and not per pipeline stage.
    count_checkpointed_blocks_from(int(next(iter(getattr(model, "layers")), 0)))  # noqa: B009
    apply_ac(
        model,
        section,
        model_compile_enabled=compiles_model(job_config),
        op_sac_save_list=SELECTIVE_SAVE_LIST,
        base_folder=job_config.job.dump_folder,
    )


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block. Call this after tensor parallelism and before compilation.

    A block recomputes all up-projections but the last, whose result is the next block's input, and
    everything between them (CoLA, section 4). Under BTP it repeats no collective.

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
    # Attention counts as an operator that can draw random numbers. To repeat it on a CPU, torch's
    # partitioner saves the generator's state after the DeviceMesh of the DTensor parameters, where
    # AOTAutograd expects tensors ("expected all tensors_saved_with_vc_check to be Tensors", seen in
    # torch 2.13 with any checkpointing). Saving attention is exact.
    cannot_repeat = any(
        isinstance(p, DTensor) and p.device_mesh.device_type == "cpu" for p in model.parameters()
    )
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        wrapped = checkpoint_wrapper(
            block,
            checkpoint_fn=checkpoint_block,
            save_attention=save_attention,
            save_attention_compiled=save_attention or cannot_repeat,
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
    """Run a block forward; its backward recomputes everything but what the block saves.

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
            preserve_rng_state=False,  # a block draws no random numbers
            context_fn=contexts,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    return Recomputation(block, args, kwargs, Tape(save_attention)).forward()


class Recomputation:
    """A forward pass whose saved tensors are computed again when backward needs the first of them.

    ``torch.utils.checkpoint`` does this anew for every call of autograd. The weights' half of a
    split backward is one call per linear: a block would run as often, and what each call leaves
    would stay until the last. Here all calls of a backward share one recomputation.

    Args:
        function: Called in forward, and again in backward until the last saved tensor is there.
        args: Its positional arguments, which are kept.
        kwargs: Its keyword arguments.
        tape: Holds the results that are not computed again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tape: Tape,
    ) -> None:
        self.function, self.args, self.kwargs, self.tape = function, args, kwargs, tape
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}
        # Autocast ends before backward begins.
        devices = {"cpu"} | {x.device.type for x in args if isinstance(x, Tensor)}
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in sorted(devices)
            if torch.amp.is_autocast_available(device)
        ]

    def forward(self) -> Any:
        """Run the function; autograd gets numbers in place of the tensors that it saves."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, self.tape.recording():
            return self.function(*self.args, **self.kwargs)

    def _pack(self, x: Tensor) -> int:
        self._shapes.append((x.shape, x.dtype))
        return len(self._shapes) - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self._found:
            self._recompute()
        return self._found.pop(number)

    def _recompute(self) -> None:
        count = 0

        def collect(x: Tensor) -> None:
            nonlocal count
            if (x.shape, x.dtype) != self._shapes[count]:
                raise RuntimeError(_ANOTHER_PATH)
            self._found[count] = x.detach()
            count += 1
            if count == len(self._shapes):
                raise _AllFound

        hooks = torch.autograd.graph.saved_tensors_hooks(collect, _never)
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            args, kwargs = tree_map(_cut_loose, (self.args, self.kwargs))
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(hooks)
            stack.enter_context(self.tape.replaying())
            stack.enter_context(suppress(_AllFound))
            self.function(*args, **kwargs)
        if count < len(self._shapes):
            raise RuntimeError(_ANOTHER_PATH)


_ANOTHER_PATH = (
    "low-rank checkpointing: the recomputation took another path than the forward pass; was it "
    "under a context, such as sdpa_kernel, that ended?"
)


class _AllFound(Exception):
    """Ends a recomputation."""


def _cut_loose(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.requires_grad:
        return x
    leaf = x.detach().requires_grad_()
    # Module hooks (the FLOP counter's) run other operators on leaves than on results.
    return leaf if x.is_leaf else leaf.view_as(leaf)


def _never(packed: Any) -> Tensor:
    raise RuntimeError("the graph of a recomputation is never run backward")


def _without_latents(family: ModelFamily) -> ConfigError:
    want = f"another mode for {family.model_name}, which has no low-rank activations"
    return ConfigError("activation_checkpoint.mode", "low_rank", want)


def _policy(kept: frozenset[Any], context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    kept = frozenset({torch.ops.torchtitan_lr.keep.default})
    return create_selective_checkpoint_contexts(partial(_policy, kept))


def _contexts_saving_attention() -> Any:
    kept = ATTENTION_OPERATORS | {torch.ops.torchtitan_lr.keep.default}
    return create_selective_checkpoint_contexts(partial(_policy, kept))
