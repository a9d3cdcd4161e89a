# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torchtitan's configuration, tables and counters.

The functions import torchtitan lazily: the launcher uses this module, and its early errors must not
wait seconds for that import.

Tested with torchtitan 0.2.2, the last release with TOML files and TrainSpec; pyproject.toml pins
it.
"""

from typing import Any


def merged_job_config(extension: Any) -> Any:
    """Return torchtitan's JobConfig merged with the sections of an extension.

    Upstream merges only inside its command-line parser, which exits the process on an error. Calls
    ``ConfigManager._merge_configs``; if upstream removes it, every start fails with an
    AttributeError.
    """
    from torchtitan.config import ConfigManager, JobConfig

    return ConfigManager._merge_configs(JobConfig, extension)


def fill_job_config(config_class: Any, values: dict[str, Any]) -> Any:
    """Return an instance of a merged JobConfig, given checked values by section and key.

    Calls ``ConfigManager._dict_to_dataclass``; the manager's other tasks (parsing text, checking
    the tokenizer) are done before or after. If upstream removes it, every start fails with an
    AttributeError.
    """
    from torchtitan.config import ConfigManager

    return ConfigManager()._dict_to_dataclass(config_class, values)


def registered_specs() -> dict[str, Any]:
    """Return the table (not a copy) of registered TrainSpecs by model name.

    Upstream's public functions add to ``train_spec._extra_train_specs`` and look up one name, but
    cannot list or replace entries. If upstream moves the table, registration fails with an
    AttributeError.
    """
    from torchtitan.protocols import train_spec

    table: dict[str, Any] = train_spec._extra_train_specs
    return table


def mesh_of(parallel_dims: Any, name: str) -> Any:
    """Return a mesh dimension of any size; the public ``get_mesh`` raises for size 1.

    A model without data parallelism is wrapped over a group of one, see `apply_data_parallel`.
    Reads ``ParallelDims._meshes``, which ``world_mesh`` fills as a side effect. If upstream fills
    it elsewhere, this raises a KeyError or an AttributeError before the first step.
    """
    parallel_dims.world_mesh  # noqa: B018  (builds the meshes)
    return parallel_dims._meshes[name]


def count_checkpointed_blocks_from(first: int) -> None:
    """Reset torchtitan's counter of checkpointed blocks to ``first``.

    ``selective_ac_option = "2"`` checkpoints every second block. Upstream counts blocks in a module
    variable, ``_layer_sac_count``, across all models of a process, including a second pipeline
    stage and rehearsed models. If upstream renames it, writing it has no effect; this function's
    test fails first.
    """
    from torchtitan.distributed import activation_checkpoint

    activation_checkpoint._layer_sac_count = first


def init_optimizer_container(
    container: Any, parameters: list[Any], defaults: dict[str, Any]
) -> None:
    """Run the last part of the constructor of torchtitan's OptimizersContainer.

    The constructor builds one torch optimizer per model part; TSR-Adam has its own, so the
    constructor is skipped. Calls ``_post_init``, which initializes torch's Optimizer (scheduler
    hooks). If upstream renames it, building TSR-Adam fails with an AttributeError.

    Args:
        container: A subclass of OptimizersContainer with ``model_parts`` and ``optimizers`` set.
        parameters: Of all parts.
        defaults: Of the optimizer, by name.
    """
    container._post_init(parameters, defaults)


def drop_marker(values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments without torchtitan's marker field.

    ``BaseModelArgs`` has a field ``_enforced``, whose only purpose is to require defaults on all
    other fields. If upstream adds another marker, it appears in exported files, and a test fails.
    """
    return {key: value for key, value in values.items() if key != "_enforced"}
