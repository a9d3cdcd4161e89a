# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model that a configuration describes, before anything is built."""

from typing import Any


def configured_args(config: Any) -> Any:
    """Return the model's arguments as a run has them; a ConfigError if they do not fit together."""
    from torchtitan_lr.titan.specs import get_train_spec

    # A copy, which the job's settings may change: see `FlavorTable`.
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    args.update_from_config(config)
    return args


def llama_args(config: Any) -> Any:
    """Return `configured_args` of our models, None for another package's model."""
    from torchtitan_lr.models.args import LlamaArgs

    args = configured_args(config)
    return args if isinstance(args, LlamaArgs) else None


def empty_model(args: Any) -> Any:
    """Build a model on the meta device, without memory for it."""
    import torch

    from torchtitan_lr.models.llama import LlamaModel

    with torch.device("meta"):
        return LlamaModel(args)


_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}


def model_shapes(args: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in the order of the model, built once per process."""
    key = repr(args)
    if key not in _SHAPES:
        parameters = empty_model(args).named_parameters()
        _SHAPES[key] = {name: tuple(each.shape) for name, each in parameters}
    return dict(_SHAPES[key])
