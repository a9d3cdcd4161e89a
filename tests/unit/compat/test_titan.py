# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's configuration, tables and trainer."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.unit.compat.doors import changed, parameters
from torchtitan_lr.compat import fake, titan, titan_trainer
from torchtitan_lr.training.device import bind_device


def test_titan_merges_and_fills_a_configuration():
    @dataclasses.dataclass
    class Section:
        key: int = 1

    @dataclasses.dataclass
    class Extension:
        ours: Section = dataclasses.field(default_factory=Section)

    merged = titan.merged_job_config(Extension)
    config = titan.fill_job_config(merged, {"ours": {"key": 2}, "training": {"steps": 3}})
    want = changed("ConfigManager._merge_configs, ._dict_to_dataclass", "titan")
    assert (config.ours.key, config.training.steps) == (2, 3), want


def test_titan_the_table_of_specs():
    from torchtitan.protocols import train_spec

    table = titan.registered_specs()
    want = changed("train_spec._extra_train_specs", "titan.registered_specs")
    table["a test's"] = marker = object()
    try:
        assert train_spec.get_train_spec("a test's") is marker, want
    finally:
        del table["a test's"]


def test_titan_a_mesh_of_one():
    from torchtitan.distributed import ParallelDims

    with fake.fake_process_group(1):
        bind_device()
        dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)
        want = changed("ParallelDims._meshes", "titan.mesh_of")
        for name in ("fsdp", "dp_replicate"):
            assert titan.mesh_of(dims, name).size() == 1, want


def test_titan_counts_checkpointed_blocks():
    from torchtitan.distributed import activation_checkpoint as titan_ac

    want = changed("activation_checkpoint._layer_sac_count", "titan")
    assert "_layer_sac_count" in vars(titan_ac), want
    assert "global _layer_sac_count" in inspect.getsource(titan_ac), want
    titan.count_checkpointed_blocks_from(5)
    assert titan_ac._layer_sac_count == 5, want


def test_titan_the_end_of_a_containers_constructor():
    from torchtitan.components.optimizer import OptimizersContainer

    want = changed("OptimizersContainer._post_init", "titan.init_optimizer_container")
    assert parameters(OptimizersContainer._post_init) == ("all_params", "optimizer_kwargs"), want
    assert "self._post_init(" in inspect.getsource(OptimizersContainer.__init__), want


def test_titan_a_models_arguments_have_one_marker():
    from torchtitan.protocols import BaseModelArgs

    fields = [field.name for field in dataclasses.fields(BaseModelArgs)]
    assert fields == ["_enforced"], changed("BaseModelArgs._enforced", "titan.drop_marker")
    assert titan.drop_marker({"_enforced": "", "dim": 3}) == {"dim": 3}


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
    assert found | {"torchtitan.tools.utils"} == set(titan_trainer.DEVICE_HOLDERS), changed(
        f"modules that bind the device: {found}", "titan_trainer.DEVICE_HOLDERS"
    )


def test_trainer_peaks_are_asked_where_they_are_replaced():
    import torchtitan.components.metrics as metrics

    want = changed("utils.get_peak_flops", "titan_trainer.bind_peak_flops")
    assert "utils.get_peak_flops(" in inspect.getsource(metrics), want
    assert titan_trainer.known_peak_flops("no such device") == titan_trainer.UNKNOWN_PEAK, want


def test_trainer_parts_are_looked_up_where_they_are_replaced():
    import torchtitan.train as titan_train
    from torchtitan.distributed import utils as dist_utils

    source = inspect.getsource(titan_train.Trainer.__init__)
    for call in ("CheckpointManager(", "ensure_pp_loss_visible(", "dist_utils.maybe_enable_amp("):
        assert f" {call}" in source, changed(call, "titan_trainer.trainer_parts")
    with titan_trainer.trainer_parts(dict):
        assert titan_train.CheckpointManager is dict
        assert titan_train.ensure_pp_loss_visible(None, None, None) is None
        with dist_utils.maybe_enable_amp(None, None, None):
            pass


def test_trainer_loggers():
    import torchtitan.components.metrics as metrics

    want = changed("metrics._build_metric_logger", "titan_trainer.without_loggers")
    assert parameters(metrics._build_metric_logger) == ("job_config", "parallel_dims", "tag"), want
    assert "_build_metric_logger(" in inspect.getsource(metrics.MetricsProcessor.__init__), want
    with titan_trainer.without_loggers():
        assert type(metrics._build_metric_logger(1, 2, 3)) is metrics.BaseLogger


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_create_checkpoint_id", ("step", "folder")),
        ("_async_wait", ()),
        ("_flattened_model_states_sd", ("state_dict",)),
    ],
)
def test_trainer_the_managers_private_steps(name, arguments):
    manager = titan_trainer.OpenCheckpointManager
    assert hasattr(manager, name), changed(f"CheckpointManager.{name}", "OpenCheckpointManager")
    assert parameters(getattr(manager, name)) == arguments
    assert "os.path.exists(self.folder)" in inspect.getsource(manager.load), changed(
        "CheckpointManager.load", "OpenCheckpointManager.as_if_without_folder"
    )
