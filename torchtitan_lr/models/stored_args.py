# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A model's arguments in a JSON file: of exported or imported weights, and as ``model.flavor``."""

import dataclasses
import json
from pathlib import Path

from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.base import drop_marker
from torchtitan_lr.titan.specs import RoPEScalingArgs

MODEL_ARGS = "model_args.json"
SUFFIX = ".json"

_WRITERS = "what torchtitan-lr export or torchtitan-lr import wrote"


def read_model_args(path: Path) -> LlamaArgs:
    """Read the ``model_args.json`` next to weights.

    Raises:
        ConfigError: The file is missing or unreadable, or does not describe a valid model.
    """
    try:
        values = json.loads(path.read_text())
        scaling = values.pop("rope_scaling", None)
        return LlamaArgs(**values, rope_scaling=scaling and RoPEScalingArgs(**scaling))
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), str(error), _WRITERS) from error


def write_model_args(args: LlamaArgs, path: Path) -> None:
    """Write a model's arguments as JSON."""
    path.write_text(json.dumps(drop_marker(dataclasses.asdict(args)), indent=2) + "\n")


def is_file_name(flavor: str) -> bool:
    """Return whether a ``model.flavor`` is the path of a file and not the name of a size."""
    return flavor.endswith(SUFFIX)


def read_flavor(path: str, family: str) -> LlamaArgs:
    """Read the file that ``model.flavor`` names.

    Args:
        path: The file; relative to the working directory, else to the package's parent folder.
        family: The family of ``model.name``.

    Raises:
        ConfigError: As for `read_model_args`, or the file has a model of another family.
    """
    here = user_path(path, "model.flavor")
    shipped = Path(__file__).resolve().parents[2] / path
    found = shipped if not here.is_file() and shipped.is_file() else here
    if not found.is_file():
        raise ConfigError("model.flavor", path, f"a size such as debug, or a {MODEL_ARGS}")
    args = read_model_args(found)
    if args.family != family:
        want = f"{args.model_family.model_name!r} as in {path}"
        raise ConfigError("model.name", f"llama_{family}", want)
    return args
