# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All that this package uses of torchtitan: another version changes this room only.

The modules are split by what importing them loads: this one neither torch nor torchtitan,
`configuration` torch, `base` what ``import torchtitan`` loads anyway, `specs` ``datasets`` too.
"""

# Tested with torchtitan 0.2.2, the last release with TOML files and TrainSpec, which pyproject.toml
# pins. In 0.3.0 these names are gone (read from its wheel): in `base` JobConfig, Optimizer,
# ActivationCheckpoint, apply_ac, BaseModelArgs, ModelProtocol and ``_layer_sac_count``; in
# `components` build_optimizers, build_lr_schedulers and ``_async_wait``; in `specs`
# RoPEScalingArgs, Llama3StateDictAdapter, TrainSpec, ParallelizeFunction, get_train_spec,
# register_train_spec, the table behind them and generate_llm_fqn_per_model_part; in `trainer`
# maybe_enable_amp.
import logging

# Both are stated again, not imported: the launcher and the checks start without torch.
IGNORE_INDEX = -100
"""The label that no loss counts: torchtitan's, and the default of torch's cross entropy."""

logger = logging.getLogger()  # torchtitan's logger, which is the root logger
