# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's configuration, tables and trainer."""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path

from tests.unit.compat.doors import changed
from torchtitan_lr.titan import device


def test_trainer_every_holder_of_the_device_is_known():
    """Searched in the files of torchtitan that run with our models."""
    root = Path(importlib.util.find_spec("torchtitan").origin).parent
    folders = ("components", "config", "distributed", "protocols", "tools")
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    found = {
        ".".join(("torchtitan", *path.relative_to(root).with_suffix("").parts))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "torchtitan.tools.utils"
        if {alias.name for alias in node.names} & {"device_type", "device_module"}
    }
    assert found | {"torchtitan.tools.utils"} == set(device.DEVICE_HOLDERS), changed(
        f"modules that bind the device: {found}", "device.DEVICE_HOLDERS"
    )


def test_trainer_peaks_are_asked_where_they_are_replaced():
    import torchtitan.components.metrics as metrics

    want = changed("utils.get_peak_flops", "device.bind_peak_flops")
    assert "utils.get_peak_flops(" in inspect.getsource(metrics), want
    assert device.known_peak_flops("no such device") == device.UNKNOWN_PEAK, want
