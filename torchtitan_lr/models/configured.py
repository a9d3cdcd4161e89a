# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model that a configuration describes, before anything is built."""

from typing import Any, cast


def llama_args(config: Any) -> Any:
    """Return our model's arguments as a run has them, None for another package's model.

    Call it after ``check_model``: name and flavor are known ones then.
    """
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.titan.specs import get_train_spec

    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    if not isinstance(args, LlamaArgs):
        return None
    args.update_from_config(config)
    return args


def model_size(args: Any, seq_len: int) -> tuple[int, int]:
    """Return the parameters of a model and its FLOPs per token, without memory for it.

    Args:
        args: The model's arguments.
        seq_len: Tokens in a sequence, on which attention's share depends.
    """
    import torch

    from torchtitan_lr.models.llama import LlamaModel

    with torch.device("meta"):
        model = LlamaModel(args)
    return cast(tuple[int, int], args.get_nparams_and_flops(model, seq_len))


def model_shapes(args: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model, without memory for it."""
    import torch

    from torchtitan_lr.models.llama import LlamaModel

    with torch.device("meta"):
        model = LlamaModel(args)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
