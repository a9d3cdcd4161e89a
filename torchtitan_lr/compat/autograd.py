# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Autograd node numbers, and the wrappers of modules; tested with torch 2.11 and 2.13.

Torch has no public function for the running node, by which the ledger knows the running part;
module hooks miss compiled blocks and FSDP2's own nodes.
"""

import re
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

# torchtitan wraps blocks with this function and expects the names and hooks that it makes. The
# module is private.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)


def version_of(x: torch.Tensor) -> int:
    """Return how often a tensor's memory was changed in place (``_version``), with its aliases."""
    return int(x._version)


def backward_may_repeat() -> bool:
    """Return whether backward keeps its graph, so that a node may run and read its saves again."""
    # If the function is gone, every pass counts as one that keeps its graph, and the head's loss
    # takes memory for one more gradient.
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())


def backward_number() -> int | None:
    """Return the number of the backward pass that this thread is in, None outside of one."""
    # If upstream changes the -1, the ledger counts every collective as backward.
    number = int(torch._C._current_graph_task_id())
    return None if number == -1 else number


after_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Calls a function when the running backward pass ends, before ``backward()`` returns.

Functions run in the order of these calls; FSDP2 itself registers one when backward reaches its
root. Raises a RuntimeError if no backward pass is running.
"""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the number of the next autograd node of this thread.

If upstream numbers nodes differently, the nodes of a module are no longer a range and the ledger
attributes backward collectives to the wrong module.
"""


def running_node_number() -> int | None:
    """Return the running autograd node's number; None in a callback or ``AccumulateGrad``."""
    node = torch._C._current_autograd_node()
    if node is None or type(node).__name__ == "AccumulateGrad":
        return None
    return int(node._sequence_nr())


def checkpointed_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside the checkpoint wrappers of a module, itself included."""
    # Recomputation calls the inner module and not its wrapper, so hooks must be there. Compiled
    # parts are left out: what they repeat is inside their backward.
    # If upstream renames `_orig_mod`, hooks get into compiled blocks. `clean_name` must follow.
    return [
        part._checkpoint_wrapped_module
        for name, part in module.named_modules()
        if isinstance(part, CheckpointWrapper) and "_orig_mod" not in name.split(".")
    ]


_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def clean_name(fqn: str) -> str:
    """Return a parameter's name without the prefixes of module wrappers."""
    # Torch's checkpoint wrapper, `torch.compile` and FSDP each insert a private name into the path
    # of every parameter below them. If upstream renames one, names differ between layouts:
    # initialization would draw other weights, and TSR-Adam and gradient compression would select
    # other tensors. A test wraps a module and compares its names.
    return _WRAPPERS.sub("", fqn)
