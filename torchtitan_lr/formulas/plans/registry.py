# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All plans on paper, by name."""

from torchtitan_lr.formulas.plans.btp import BTPFormula
from torchtitan_lr.formulas.plans.caat import BTPCaatFormula, CaatFormula
from torchtitan_lr.formulas.plans.formula import PlanFormula
from torchtitan_lr.formulas.plans.megatron import MegatronFormula
from torchtitan_lr.formulas.plans.vanilla import VanillaFormula, VanillaReplicatedFormula
from torchtitan_lr.formulas.traffic import PlanSettings

FORMULAS: dict[str, PlanFormula] = {}
"""Formulas by the name of their plan."""

UNSPLIT = PlanFormula()
"""What holds on a single rank, whatever the plan."""


def register_formula(formula: PlanFormula) -> None:
    """Make a plan known to the formulas, under its name.

    Args:
        formula: Of a plan that `parallel.plans.register_plan` gets by the same name.
    """
    FORMULAS[formula.name] = formula


def formula_of(settings: PlanSettings, tp_degree: int) -> PlanFormula:
    """Return the formula of a plan; on a single rank that of none.

    Args:
        settings: With the plan named (not ``auto``) where T > 1.
        tp_degree: Tensor-parallel ranks T.
    """
    return UNSPLIT if tp_degree == 1 else FORMULAS[settings.plan]


for _formula in (
    BTPFormula(),
    VanillaFormula(),
    VanillaReplicatedFormula(),
    MegatronFormula(),
    CaatFormula(),
    BTPCaatFormula(),
):
    register_formula(_formula)
