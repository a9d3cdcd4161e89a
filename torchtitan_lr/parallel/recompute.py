# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Activation checkpointing: torchtitan's modes, and ``low_rank``.

``low_rank`` saves r-wide activations and recomputes d- and f-wide ones: from the latents and the
block's input, backward recomputes up-projections, rotary embedding, norms, SwiGLU and attention; no
down-projection runs twice (CoLA-M: CoLA, section 4). Under BTP the latents are saved after the
all-reduce, with the norms' statistics, so that recomputation communicates nothing (BOOST, section
4).

Autograd Functions name what is kept, see `models.kept`. Torch's selective checkpointing saves the
results of chosen operators and, outside of compiled code, repeats whatever leads to them: the
product in front of a saved all-reduce would run again for nothing. It also frees them after the
first recomputation, and a split backward needs two. A `Recomputation` keeps the results of whole
computations.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_lr.compat.autograd import checkpoint_wrapper, checkpointed_modules, version_of
from torchtitan_lr.compat.dispatch import (
    ATTENTION_OPERATORS,
    FLEX_ATTENTION,
    FLEX_ATTENTION_CALL,
    TorchDispatchMode,
    tree_map_only,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.families import find_family
from torchtitan_lr.models.kept import keep, kept_by, mark_in_graphs
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, apply_ac, count_checkpointed_blocks_from

# Operators with outputs that ``selective_ac_option = "op"`` saves: the expensive ones. torchtitan
# saves every second matmul as well. Its own list lacks attention on the CPU.
_ATTENTION = (*ATTENTION_OPERATORS, FLEX_ATTENTION, FLEX_ATTENTION_CALL)
SELECTIVE_SAVE_LIST = {torch.ops.aten.mm.default, *_ATTENTION}

# Modes in which wrapped blocks recompute. In ``memory_budget`` the compiler chooses what to
# recompute, and its choice cannot be measured before a run: the mode counts as a share of the way
# from ``full`` to ``none``.
EAGER_MODES = ("none", "selective", "full", "low_rank")

# Modes in which torch can compile tensor-parallel blocks on a CPU: torch 2.13 cannot if attention
# is recomputed.
COMPILES_ON_CPU = ("none", "low_rank")

# Policies of compiled blocks, by whether attention's results are saved.
_KEPT = torch.ops.torchtitan_lr.keep.default
_COMPILED_SAVES = {
    False: partial(create_selective_checkpoint_contexts, [_KEPT]),
    True: partial(
        create_selective_checkpoint_contexts, [_KEPT, *ATTENTION_OPERATORS, FLEX_ATTENTION]
    ),
}


def check_mode(config: Any) -> None:
    """Refuse a mode that the configuration cannot have, by a ConfigError."""
    section, family = config.activation_checkpoint, find_family(config.model.name)
    key = "activation_checkpoint.mode"
    if section.mode == "low_rank" and family is not None and not family.low_rank:
        want = f"another mode for {family.model_name}, which has no low-rank activations"
        raise ConfigError(key, section.mode, want)
    if section.mode not in EAGER_MODES and not compiles_model(config):
        want = "'selective', 'full' or 'none' unless compile.enable with the component 'model'"
        raise ConfigError(key, section.mode, want)


def wrapping_period(section: Any, mode: str) -> int:
    """Return the number of blocks after which the pattern of wrapped blocks repeats."""
    # ``selective`` wraps every n-th block, or recomputes cheap operators of all blocks (``op``).
    option = section.selective_ac_option
    return int(option) if mode == "selective" and option.isdecimal() else 1


def compiles_model(job_config: Any) -> bool:
    """Return whether ``[compile]`` enables the compilation of decoder blocks."""
    return bool(job_config.compile.enable and "model" in job_config.compile.components)


def apply_activation_checkpoint(model: nn.Module, job_config: JobConfig) -> None:
    """Wrap decoder blocks in the mode of ``[activation_checkpoint]``."""
    # Call it after tensor parallelism and before compilation. An estimate passes only the sections
    # ``activation_checkpoint``, ``compile`` and ``job``.
    section: Any = job_config.activation_checkpoint
    if section.mode == "none":
        return
    from torchtitan_lr.parallel.context import GatheredAttention  # which builds on this module

    if section.mode == "low_rank":
        apply_low_rank_checkpoint(model, section.low_rank_save_attention)
    else:
        # "2" wraps every second block, counted over the whole model and not per pipeline stage.
        count_checkpointed_blocks_from(int(next(iter(getattr(model, "layers")), 0)))  # noqa: B009
        apply_ac(
            model,
            section,
            model_compile_enabled=compiles_model(job_config),
            op_sac_save_list=SELECTIVE_SAVE_LIST,
            base_folder=job_config.job.dump_folder,
        )
    for wrapped in checkpointed_modules(model):
        for module in wrapped.modules():
            if isinstance(module, GatheredAttention):
                module.repeats = False


def apply_low_rank_checkpoint(model: nn.Module, save_attention: bool) -> None:
    """Wrap every decoder block. Call this after tensor parallelism and before compilation."""
    # A block recomputes all up-projections but the last, whose result is the next block's input
    # (CoLA, section 4). Attention's output (b, s, d/T) and log-sum-exp (b, heads/T, s) may stay.
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
    block: Callable[..., Any],
    *args: Any,
    save_attention: bool,
    save_attention_compiled: bool,
    **kwargs: Any,
) -> Any:
    """Run a block, or a part of one; its backward recomputes everything but what it saves."""
    if torch.compiler.is_compiling():
        # The compiler removes operators whose results only saved tensors use.
        return checkpoint(
            block,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # a block draws no random numbers
            context_fn=_COMPILED_SAVES[save_attention_compiled],
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return block(*args, **kwargs)
    return Recomputation(block, args, kwargs, save_attention).forward()


class _SavedAttention(TorchDispatchMode):
    """Saves attention's output and log-sum-exp; attention is one operator with its own backward."""

    # Without support torch would run ``flex_attention`` uncompiled, with all scores in memory.
    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ATTENTION:
            return keep(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


class _AllFound(Exception):
    """Ends a recomputation."""


class Recomputation:
    """A forward pass that runs again, once, when backward needs the first of its saved tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        save_attention: bool = False,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        # The kept results, and how often each had been changed in place.
        self.kept: list[tuple[Any, list[int]]] = []
        self.kept_next: int | None = None  # in backward, index of the next kept result
        self._attention: AbstractContextManager[Any] = (
            _SavedAttention() if save_attention else nullcontext()
        )
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._collected: list[Tensor] = []
        self._found: dict[int, Tensor] = {}

    def forward(self) -> Any:
        """Run the function; autograd gets numbers in place of the tensors that it saves."""

        def pack(x: Tensor) -> int:
            self._shapes.append((x.shape, x.dtype))
            return len(self._shapes) - 1

        with saved_tensors_hooks(pack, self._unpack):
            return self._run(None, self.args, self.kwargs)

    def keep(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Compute and keep tensors in forward; in backward, return what was kept."""
        if self.kept_next is None:
            made = compute()
            versions = [version_of(x) for x in made if isinstance(x, Tensor)]
            # Aliases: autograd writes into the tensors that a Function returns.
            self.kept.append((tree_map_only(Tensor, Tensor.detach, made), versions))
            return made
        saved, versions = self.kept[self.kept_next]
        if [version_of(x) for x in saved if isinstance(x, Tensor)] != versions:
            raise RuntimeError("a tensor that low-rank checkpointing keeps was changed in place")
        self.kept_next += 1
        kept: tuple[Any, ...] = tree_map_only(Tensor, Tensor.detach, saved)
        return kept

    def end_with(self, last: list[Tensor]) -> None:
        """Stop recomputing if backward only still needs these tensors of the calling Function."""
        missing = len(self._shapes) - len(self._collected)
        if self.kept_next is None or len(last) != missing:
            return
        if any(x.requires_grad for x in last):  # else the Function would save nothing
            self._collected += [x.detach() for x in last]
            raise _AllFound

    def _run(self, kept_next: int | None, args: Any, kwargs: Any) -> Any:
        self.kept_next = kept_next
        with kept_by(self), self._attention:
            return self.function(*args, **kwargs)

    def _unpack(self, number: int) -> Tensor:
        """Return a tensor that autograd saved, after a recomputation if it is the first one."""
        # ``torch.utils.checkpoint`` recomputes for every call of autograd. The weights' half of a
        # split backward is one call per linear: a block would run as often, and what each call
        # leaves would stay until the last.
        if number not in self._found:
            self._found = dict(enumerate(self._recompute()))
        return self._found.pop(number)

    def _recompute(self) -> list[Tensor]:
        """Run the function again, up to the last tensor that autograd saved; return all of them."""
        saved = self._collected = list[Tensor]()  # `end_with` adds to it

        def collect(x: Tensor) -> None:
            saved.append(x.detach())
            if len(saved) == len(self._shapes):
                raise _AllFound

        def in_a_new_graph(x: Tensor) -> Tensor:
            # A view, because module hooks (the FLOP counter's) run other operators on leaves than
            # on results.
            return x.detach().requires_grad_().view_as(x) if x.requires_grad else x

        with torch.enable_grad():
            args, kwargs = tree_map_only(Tensor, in_a_new_graph, (self.args, self.kwargs))
            with saved_tensors_hooks(collect, lambda x: x), suppress(_AllFound):
                self._run(0, args, kwargs)
        self._collected = []
        if [(x.shape, x.dtype) for x in saved] != self._shapes:
            raise RuntimeError(
                "low-rank checkpointing: the recomputation took another path than the forward "
                "pass; was it under a context, such as sdpa_kernel, that ended?"
            )
        return saved
