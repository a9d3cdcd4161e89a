# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read the description of a machine."""

from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path

import tomli

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.step_time import Hardware

KEYS = {field.name: field.type for field in fields(Hardware)}
OPTIONAL = {field.name for field in fields(Hardware) if field.default is not MISSING}


MACHINES = Path(__file__).parent / "machines"
"""Folder of the machines that come with the package."""


def load_hardware(name: str) -> Hardware:
    """Read a hardware file.

    Args:
        name: A path that ends in ``.toml``, or the name of a file in `MACHINES`.

    Raises:
        ConfigError: The file does not exist, or its keys are not the fields of `Hardware`; those
            with defaults may be left out.
    """
    path = Path(name) if name.endswith(".toml") else MACHINES / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MACHINES.glob("*.toml")))
        raise ConfigError("--hardware", name, f"a TOML file, or one of {known}")
    try:
        values = tomli.loads(path.read_text(encoding="utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("--hardware", name, f"a TOML file ({error})") from error
    for key in sorted(values.keys() - KEYS.keys()):
        raise ConfigError(f"{path.name}: {key}", values[key], f"one of {', '.join(KEYS)}")
    for key, kind in KEYS.items():
        if key in OPTIONAL and key not in values:
            continue
        _check(f"{path.name}: {key}", values.get(key), kind)
    if values["matmul_efficiency"] > 1:
        key = f"{path.name}: matmul_efficiency"
        raise ConfigError(key, values["matmul_efficiency"], "a fraction of the peak, at most 1")
    return Hardware(**values)


def _check(key: str, value: object, kind: object) -> None:
    if kind in (str, "str"):
        if not isinstance(value, str):
            raise ConfigError(key, value, "text")
        return
    if kind in (bool, "bool"):
        if not isinstance(value, bool):
            raise ConfigError(key, value, "true or false")
        return
    whole = kind in (int, "int")
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not isfinite(value) or value <= 0:  # type: ignore[operator, arg-type]
        raise ConfigError(key, value, f"a positive {'integer' if whole else 'number'}")
