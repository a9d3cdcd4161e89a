# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's configuration, tables and counters.

torchtitan is imported within the functions: the launcher comes through here, and what it refuses
early must not cost the seconds of that import.

Seen in torchtitan 0.2.2, the last release with TOML files and TrainSpec; pyproject.toml pins it.
"""

from typing import Any


def merged_job_config(extension: Any) -> Any:
    """Return torchtitan's JobConfig with the sections of an extension merged in.

    Upstream merges only within its command-line parser, which ends the process on an error. Calls
    ``ConfigManager._merge_configs``; if upstream removes it, every start fails with an
    AttributeError.

    Args:
        extension: A dataclass of sections.
    """
    from torchtitan.config import ConfigManager, JobConfig

    return ConfigManager._merge_configs(JobConfig, extension)


def fill_job_config(config_class: Any, values: dict[str, Any]) -> Any:
    """Return an instance of a merged JobConfig, given checked values by section and key.

    Calls ``ConfigManager._dict_to_dataclass``; what else the manager does (parse text, check the
    tokenizer) is done already or comes later. If upstream removes it, every start fails with an
    AttributeError.
    """
    from torchtitan.config import ConfigManager

    return ConfigManager()._dict_to_dataclass(config_class, values)


def registered_specs() -> dict[str, Any]:
    """Return the table of registered TrainSpecs by the model's name, not a copy.

    Upstream can add to ``train_spec._extra_train_specs`` and look one name up, but neither list
    the names nor replace one. If it moves the table, registration fails with an AttributeError.
    """
    from torchtitan.protocols import train_spec

    table: dict[str, Any] = train_spec._extra_train_specs
    return table


def mesh_of(parallel_dims: Any, name: str) -> Any:
    """Return a mesh dimension of any size; the public ``get_mesh`` refuses one of size 1.

    A model without data parallelism is wrapped over a group of one, see `apply_data_parallel`.
    Reads ``ParallelDims._meshes``, which ``world_mesh`` fills as a side effect. If upstream fills
    it otherwise, this raises a KeyError or an AttributeError before the first step.

    Args:
        parallel_dims: torchtitan's ParallelDims.
        name: Of the dimension.
    """
    parallel_dims.world_mesh  # noqa: B018  (builds the meshes)
    return parallel_dims._meshes[name]


def count_checkpointed_blocks_from(first: int) -> None:
    """Let the blocks that torchtitan checkpoints next count from ``first``.

    ``selective_ac_option = "2"`` treats every second block. Upstream counts blocks in a variable of
    its module, ``_layer_sac_count``, through all models of a process: a second pipeline stage, and
    a model that was only rehearsed, count on. If upstream renames it, writing it has no effect; the
    door's test fails first.
    """
    from torchtitan.distributed import activation_checkpoint

    activation_checkpoint._layer_sac_count = first


def init_optimizer_container(
    container: Any, parameters: list[Any], defaults: dict[str, Any]
) -> None:
    """Do what torchtitan's OptimizersContainer does at the end of its constructor.

    The constructor itself builds one torch optimizer per model part; TSR-Adam has its own, so it is
    skipped. Calls ``_post_init``, which starts torch's Optimizer (hooks of schedulers). If
    upstream renames it, building TSR-Adam fails with an AttributeError.

    Args:
        container: A subclass of OptimizersContainer with ``model_parts`` and ``optimizers`` set.
        parameters: Of all parts.
        defaults: Of the optimizer, by name.
    """
    container._post_init(parameters, defaults)


def drop_marker(values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments without torchtitan's marker, which is no value of the model's.

    ``BaseModelArgs`` has a field ``_enforced`` that only forces defaults on all other fields. If
    upstream removes it, there is nothing to drop; another marker would appear in exported files,
    and the door's test fails.
    """
    return {key: value for key, value in values.items() if key != "_enforced"}
