# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Choices of torch's compiler without a public name; tested with torch 2.13."""

from typing import Any

from torch._functorch import config as functorch_config


def remake_inputs_of_products(enabled: bool = True) -> None:
    """Let backward passes compiled from now on make element-wise inputs of products again."""
    # By default the partitioner of forward and backward keeps whatever a product of backward reads:
    # σ(h) beside h, SwiGLU's product beside its factors, the normalized stream beside the stream.
    # If the setting is gone, the results are the same and compiled blocks keep more for backward.
    if hasattr(functorch_config, "ban_recompute_materialized_backward"):
        functorch_config.ban_recompute_materialized_backward = not enabled


def lower_as_identity(operator: Any) -> None:
    """Make Inductor compile an operator of one tensor to the identity."""
    # Inductor has no public registry for this. If upstream changes the private one, compiling with
    # low-rank checkpointing fails, or calls the operator, which copies its argument. Late: the
    # import takes seconds.
    from torch._inductor.lowering import lowerings, register_lowering

    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lambda x: x)
