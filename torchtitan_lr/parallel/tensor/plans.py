# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The tensor-parallel plans of this package, and a plan's styles for a model or a stage."""

from torch import nn

from torchtitan_lr.config.schema import BUILT_IN_PLANS
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.tensor.btp import BTP
from torchtitan_lr.parallel.tensor.btp_caat import BTPCaat
from torchtitan_lr.parallel.tensor.caat import Caat
from torchtitan_lr.parallel.tensor.megatron import Megatron
from torchtitan_lr.parallel.tensor.plan import (
    PLANS,
    Styles,
    TensorParallelPlan,
    TPSettings,
    register_plan,
)
from torchtitan_lr.parallel.tensor.vanilla import Vanilla, VanillaReplicated

__all__ = ["PLANS", "TPSettings", "TensorParallelPlan", "build_tp_plan", "register_plan"]


def build_tp_plan(model: nn.Module, settings: TPSettings) -> Styles:
    """Build the plan of a model or of one pipeline stage."""
    args: LlamaArgs = model.model_args  # type: ignore[assignment]
    stage = {name for name, child in model.named_children() if child is not None}
    styles = PLANS[settings.plan].styles(args, settings)
    return {name: style for name, style in styles.items() if name.split(".")[0] in stage}


_built_in = (BTP(), Vanilla(), VanillaReplicated(), Megatron(), Caat(), BTPCaat())
PLANS.update({_plan.name: _plan for _plan in _built_in})
if (_names := tuple(_plan.name for _plan in _built_in)) != BUILT_IN_PLANS:
    raise RuntimeError(f"BUILT_IN_PLANS of config.schema must be the plans of this file: {_names}")
