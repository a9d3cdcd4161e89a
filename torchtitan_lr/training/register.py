# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One torchtitan TrainSpec per model family; importing this module registers them."""

from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.models.ends import build_loss
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.flavors import FLAVORS, FlavorTable
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.optim.containers import ConfiguredRates
from torchtitan_lr.optim.entries import build_optimizers
from torchtitan_lr.parallel.parallelize import parallelize_llama
from torchtitan_lr.parallel.stages import pipeline_llama
from torchtitan_lr.titan.specs import REGISTERED_SPECS, TrainSpec, register_train_spec
from torchtitan_lr.training.metrics import LowRankMetricsProcessor
from torchtitan_lr.training.validate import Validator


def register_model_family(family: ModelFamily) -> None:
    """Make a family known: its name, its flavors and its TrainSpec, as ``llama_`` and its name.

    Another's module is named by ``experimental.custom_import``.
    """
    FAMILIES[family.name] = family
    flavors = FLAVORS.setdefault(family.name, FlavorTable(family))
    if family.model_name in REGISTERED_SPECS:  # torchtitan raises for a second registration
        return
    spec = TrainSpec(
        model_cls=LlamaModel,
        model_args=flavors,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llama,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=ConfiguredRates,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,  # ranks read prepared tokens
        build_loss_fn=build_loss,
        build_validator_fn=Validator,
        build_metrics_processor_fn=LowRankMetricsProcessor,
        state_dict_adapter=LlamaStateDictAdapter,
    )
    register_train_spec(family.model_name, spec)


for _family in list(FAMILIES.values()):
    register_model_family(_family)
