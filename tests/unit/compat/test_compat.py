# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every door to upstream: that what it needs is there, behaves, and has the arguments it needs.

A failure names the private name of upstream and the door in ``torchtitan_lr/compat`` to mend.
"""

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_lr.compat import (
    autograd,
    checkpointing,
    collectives,
    dispatch,
    dtensor,
    elastic,
    fake,
    fsdp,
    interpreter,
    pipelining,
    titan,
    titan_trainer,
)
from torchtitan_lr.compat.names import clean_name
from torchtitan_lr.compat.overrides import OVERRIDES, REWRITES
from torchtitan_lr.training.device import bind_device

PACKAGE = Path(dispatch.__file__).parents[1]


def changed(upstream, door):
    """What to say where upstream is not what a door expects."""
    return f"upstream changed: {upstream}; mend torchtitan_lr/compat: {door}"


def parameters(function):
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def resolve(name):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        assert hasattr(found, part), changed(name, "the table that names it")
        found = getattr(found, part)
    return found


@pytest.fixture
def two_ranks():
    with fake.fake_process_group(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@pytest.fixture
def unit(two_ranks):
    return fully_shard(nn.Linear(3, 5), mesh=two_ranks)


# ---- fsdp


def test_fsdp_the_layout_of_a_unit(unit):
    (group,) = fsdp.param_groups(unit)
    want = changed("FSDPParamGroup.fsdp_params", "fsdp.unit_parameters")
    assert hasattr(group, "fsdp_params"), want
    found = list(fsdp.unit_parameters(unit))
    want = changed("FSDPParam.sharded_param, .padded_sharded_param_size", "fsdp.unit_parameters")
    assert [size for _, size in found] == [9, 3], want  # 5 rows over 2 ranks, padded
    assert all(a is b for (a, _), b in zip(found, unit.parameters(), strict=True)), want
    assert fsdp.param_groups(nn.Linear(1, 1)) == []


def test_fsdp_the_calls_of_a_unit(unit):
    called = []

    def wrap(original):
        def noted(*args, **kwargs):
            called.append(original.__name__)
            return original(*args, **kwargs)

        return noted

    undo = fsdp.wrap_unit_calls(unit, wrap)
    unit(torch.ones(2, 3)).sum().backward()
    want = changed("FSDPParamGroup.unshard, .post_backward", "fsdp.wrap_unit_calls")
    assert set(called) == {"unshard", "post_backward"}, want
    undo()
    called.clear()
    unit(torch.ones(2, 3)).sum().backward()
    assert not called


def test_fsdp_a_reduce_scatter_of_ours_is_called(unit):
    seen = {}

    class Mine(fsdp.ReduceScatter):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            seen.update(output=output_tensor.numel(), input=input_tensor.numel())

    assert set(fsdp.ReduceScatter.__abstractmethods__) == {"allocate", "__call__"}, changed(
        "the methods of ReduceScatter", "fsdp.ReduceScatter"
    )
    unit.set_custom_reduce_scatter(Mine())
    unit(torch.ones(2, 3)).sum().backward()
    assert seen == {"output": 12, "input": 24}, changed("ReduceScatter", "fsdp.ReduceScatter")


def test_fsdp_replication_is_fsdps(two_ranks):
    module = fsdp.replicate(nn.Linear(2, 2), mesh=two_ranks)
    want = changed("_composable.replicate_with_fsdp", "fsdp.replicate")
    assert isinstance(module, fsdp.ReplicateModule), want
    assert hasattr(module, "set_gradient_divide_factor"), want


# ---- autograd


def test_autograd_says_whether_backward_runs_and_which_node():
    assert not autograd.in_backward(), changed("_current_graph_task_id", "autograd.in_backward")
    x = torch.ones(2, requires_grad=True)
    start = autograd.next_node_number()
    y = x.exp()
    end = autograd.next_node_number()
    z = (y * 2).sum()
    seen = []

    def note(*_):
        seen.append((autograd.in_backward(), autograd.running_node_number()))

    y.grad_fn.register_prehook(note)
    x.register_post_accumulate_grad_hook(note)
    z.backward()
    (inside, number), (_, accumulating) = seen
    assert inside, changed("_current_graph_task_id", "autograd.in_backward")
    assert start <= number < end, changed("Node._sequence_nr", "autograd.running_node_number")
    assert accumulating is None, changed("the name AccumulateGrad", "autograd.running_node_number")


def test_autograd_the_wrapper_of_checkpointed_modules():
    inner = nn.Linear(1, 1)
    wrapper = autograd.checkpoint_wrapper(inner)
    assert autograd.checkpointed_module(wrapper) is inner, changed(
        "CheckpointWrapper._checkpoint_wrapped_module", "autograd.checkpointed_module"
    )
    assert autograd.checkpointed_module(inner) is None


def test_names_lose_what_wrappers_put_into_them():
    model = nn.Sequential(torch.compile(autograd.checkpoint_wrapper(nn.Linear(1, 1))))
    names = [name for name, _ in nn.Module.named_parameters(model)]
    assert any("_orig_mod" in name for name in names)
    assert {clean_name(name) for name in names} == {"0.weight", "0.bias"}, changed(
        f"names in a parameter's path: {names}", "names.clean_name"
    )


# ---- dispatch, fake


def test_dispatch_knows_every_fused_attention_kernel():
    """Forward operators of torch for attention; those of other devices and the unfused are none."""
    known = {func.name().removeprefix("aten::") for func in dispatch.ATTENTION_OPERATORS}
    every = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::_scaled_dot_product")
    }
    others = {name for name in every - known if name.endswith(("_backward", "_mps", "_math"))}
    assert every - others == known, changed(
        "operators aten::_scaled_dot_product_*", "dispatch.ATTENTION_OPERATORS"
    )


def test_dispatch_reads_schemas():
    want = changed("OpOverload._schema", "dispatch.schema_of")
    assert dispatch.schema_of(torch.ops.aten.mul_.Tensor) == ("mul_", ["self", "other"]), want
    assert dispatch.changes_arguments(torch.ops.aten.mul_.Tensor), want
    assert not dispatch.changes_arguments(torch.ops.aten.mul.Tensor), want
    assert not dispatch.changes_arguments(len)


def test_dispatch_modes_trees_and_storages():
    seen = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        x = torch.ones(3) * 2
    assert torch.ops.aten.mul.Tensor in seen, changed("TorchDispatchMode", "dispatch")
    leaves, spec = dispatch.tree_flatten({"a": [1, 2]})
    want = changed("torch.utils._pytree", "dispatch")
    assert dispatch.tree_unflatten(leaves, spec) == {"a": [1, 2]}, want
    assert dispatch.tree_map(lambda leaf: leaf + 1, [1]) == [2], want
    assert dispatch.tree_leaves((1, {"b": 2})) == [1, 2], want
    want = changed("UntypedStorage._cdata", "dispatch.storage_address")
    address = dispatch.storage_address(x)
    assert address == dispatch.storage_address(x[1:].untyped_storage()), want
    assert address != dispatch.storage_address(x.clone()), want


def test_dispatch_the_registry_of_lowerings():
    from torch._inductor.lowering import lowerings, register_lowering

    want = changed("torch._inductor.lowering", "dispatch.lower_as_identity")
    assert torch.ops.aten.mul.Tensor in lowerings, want
    assert "type_promotion_kind" in inspect.signature(register_lowering).parameters, want


def test_fake_tensors_have_storages_but_no_memory():
    with fake.FakeTensorMode():
        x, y = torch.empty(2**40), torch.empty(2**40)
    assert isinstance(x, fake.FakeTensor), changed("FakeTensor", "fake")
    assert dispatch.storage_address(x) != dispatch.storage_address(y), changed(
        "UntypedStorage._cdata of fake tensors", "dispatch.storage_address"
    )


def test_fake_ranks_answer_at_once():
    with fake.fake_process_group(7):
        assert dist.get_world_size() == 7, changed("FakeStore", "fake.fake_process_group")
        dist.all_reduce(torch.ones(1))
    assert not dist.is_initialized()


def test_fake_dtensor_finds_shapes_where_the_door_is(two_ranks):
    x = distribute_tensor(torch.ones(4, 6), two_ranks, [Shard(0)], src_data_rank=None)
    said = []
    with fake.while_finding_shapes(said.append):
        x.view(4, 2, 3).sum(1)
    assert said, changed(
        "ShardingPropagator._propagate_tensor_meta_non_cached", "fake.while_finding_shapes"
    )
    assert said == [True, False] * (len(said) // 2)


# ---- dtensor, collectives


def test_dtensor_parts_and_strided_shards(two_ranks):
    whole = torch.arange(8.0)
    x = distribute_tensor(whole, two_ranks, [Shard(0)], src_data_rank=None)
    part = dtensor.local_part(x)
    want = changed("DTensor._local_tensor", "dtensor.local_part")
    assert isinstance(x, DTensor) and part is dtensor.local_part(x), want
    assert torch.equal(part, whole[:4]), want
    assert dtensor.local_part(whole) is whole
    strided = dtensor.StridedShard(0, split_factor=2)
    want = changed("_StridedShard", "dtensor.StridedShard")
    assert (strided.dim, strided.split_factor) == (0, 2), want


def test_collectives_of_groups(two_ranks):
    group = two_ranks.get_group()
    want = changed("_resolve_process_group", "collectives.group_size")
    assert collectives.group_size(group.group_name) == 2, want
    want = changed("ProcessGroup.unbox", "collectives.group_name_of")
    boxed = []

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            boxed.extend(a for a in args if isinstance(a, torch.ScriptObject))
            return func(*args, **(kwargs or {}))

    with Mode():
        dist.all_reduce(torch.ones(2), group=group)
    names = set()
    for found in boxed:
        try:
            names.add(collectives.group_name_of(found))
        except (RuntimeError, TypeError):  # the operation is boxed, too
            continue
    assert group.group_name in names, want
    assert collectives.group_name_of("a") == "a"


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_collectives_functional_operators(operator, arguments):
    schema = getattr(collectives.functional, operator).default._schema
    assert [argument.name for argument in schema.arguments] == arguments, changed(
        f"_c10d_functional::{operator}", "collectives.functional"
    )


def test_collectives_of_one_tensor(two_ranks):
    out = torch.zeros(2)
    collectives.reduce_scatter(out, torch.ones(4), group=two_ranks.get_group())
    collectives.all_gather(torch.zeros(4), out, group=two_ranks.get_group())
    assert isinstance(collectives.AsyncCollectiveTensor, type)


# ---- pipelining


def test_pipelining_the_arguments_of_a_stage():
    """torchtitan's one call of PipelineStage, as `stages_built_by` takes it."""
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(titan_pipeline)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PipelineStage"
    ]
    found = [(len(call.args), [keyword.arg for keyword in call.keywords]) for call in calls]
    assert found == [(4, ["group"])], changed("calls of PipelineStage", "pipelining")


DEVICE, GROUP = torch.device("cpu"), object()


@pytest.fixture
def stage():
    import torchtitan.distributed.pipeline_parallel as titan_pipeline

    with pipelining.stages_built_by(lambda *values: values, 4, DEVICE, GROUP):
        yield lambda *args, **named: titan_pipeline.PipelineStage(*args, **named)


def test_pipelining_a_known_stage_is_built(stage):
    assert stage("part", 3, 4, DEVICE, group=GROUP) == ("part", 3)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("part", 3, 4, DEVICE), {"group": GROUP, "dw_builder": None}),
        (("part", 3, 4, DEVICE, "more"), {"group": GROUP}),
        (("part", 3, 4, DEVICE), {}),
        (("part", 3, 4), {"group": GROUP, "device": DEVICE}),
    ],
)
def test_pipelining_an_unknown_argument_is_refused(stage, args, named):
    with pytest.raises(TypeError, match=r"PipelineStage .*torchtitan_lr\.compat\.pipelining"):
        stage(*args, **named)


@pytest.mark.parametrize(
    ("stages", "device", "group"),
    [(5, DEVICE, GROUP), (4, torch.device("meta"), GROUP), (4, DEVICE, object())],
)
def test_pipelining_another_pipelines_stage_is_refused(stage, stages, device, group):
    with pytest.raises(RuntimeError, match="expected 4 on cpu"):
        stage("part", 3, stages, device, group=group)


def test_pipelining_schedules():
    from torch.distributed.pipelining import schedules

    want = changed("_PipelineSchedule", "pipelining.PipelineSchedule")
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble"):
        assert issubclass(getattr(schedules, name), pipelining.PipelineSchedule), want
    order = pipelining.rank_order("Interleaved1F1B", 0, 2, 2, 4)
    assert len(order) == 2 * 2 * 4, changed(
        "_calculate_single_rank_operations", "pipelining.rank_order"
    )


# ---- checkpointing, interpreter, elastic


def test_checkpointing_knows_every_class_that_dcp_writes(tmp_path):
    state = {"w": torch.ones(2), "b": {"n": 1, "l": [torch.zeros(1)]}, "d": torch.ones(1).half()}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    named = set()

    class Names(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    with open(tmp_path / ".metadata", "rb") as file:
        Names(file).load()
    dtypes = {pair for pair in named if isinstance(getattr(torch, pair[1], None), torch.dtype)}
    assert ("torch.distributed.checkpoint.metadata", "Metadata") in named
    unknown = named - checkpointing.METADATA_CLASSES - dtypes
    assert not unknown, changed(f"DCP writes {unknown}", "checkpointing.METADATA_CLASSES")
    for module, name in checkpointing.METADATA_CLASSES:
        if module.startswith("torch"):
            assert hasattr(importlib.import_module(module), name), changed(
                f"{module}.{name}", "checkpointing.METADATA_CLASSES"
            )


def test_checkpointing_sets_a_value_by_its_path():
    values = {}
    checkpointing.set_element(values, ("a", 0, "b"), 3)
    want = changed("dcp._nested_dict.set_element", "checkpointing.set_element")
    assert values == {"a": [{"b": 3}]}, want


def test_interpreter_runs_what_is_registered():
    code = (
        "import atexit, os; from torchtitan_lr.compat.interpreter import run_exit_functions;"
        "atexit.register(print, 'end'); run_exit_functions(); os.write(1, b'after'); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "end\nafter", changed("atexit._run_exitfuncs", interpreter.__name__)


def test_elastic_how_torchrun_starts_and_ends_ranks():
    want = changed("SubprocessContext._close", "elastic.close_ranks")
    assert parameters(elastic.close_ranks) == ("death_sig", "timeout"), want
    api = inspect.getsource(inspect.getmodule(elastic.SubprocessContext))
    assert "self._close(death_sig=death_sig, timeout=timeout)" in api, want
    handler = importlib.import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    )
    want = changed("Popen in subprocess_handler", "elastic.ranks_started_with")
    assert "return Popen(" in inspect.getsource(handler.SubprocessHandler), want
    with elastic.ranks_started_with(print, len):
        assert (handler.Popen, elastic.SubprocessContext._close) == (print, len), want
    assert handler.Popen is subprocess.Popen
    assert elastic.SubprocessContext._close is elastic.close_ranks


# ---- torchtitan


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

    want = changed("metrics._build_metric_logger", "titan_trainer.build_loggers")
    assert parameters(metrics._build_metric_logger) == ("job_config", "parallel_dims", "tag"), want
    assert "_build_metric_logger(" in inspect.getsource(metrics.MetricsProcessor.__init__), want
    want = changed("metrics._get_metrics_rank", "titan_trainer.build_loggers")
    assert "_get_metrics_rank(" in inspect.getsource(metrics._build_metric_logger), want
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


# ---- what our own code takes over


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override.ours)
def test_an_overridden_method_is_there_and_called(override):
    want = changed(override.upstream, "overrides.OVERRIDES")
    assert parameters(resolve(override.upstream)) == override.parameters, want
    name = override.upstream.rpartition(".")[2]
    assert f".{name}(" in inspect.getsource(resolve(override.caller)), want
    owner, _, method = override.ours.rpartition(".")
    assert method == name
    assert method in vars(resolve(owner)), f"{override.ours} overrides nothing"


def test_every_overridden_private_method_is_listed():
    """In the classes of modules that define a private method at all."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        private = [c.name for c in classes if c.bases and any(map(is_private_method, c.body))]
        if not private:
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for cls in (getattr(module, name) for name in private):
            above = [
                base for base in cls.__mro__ if not base.__module__.startswith("torchtitan_lr")
            ]
            inherited = set().union(*(vars(base) for base in above))
            found |= {
                f"{module.__name__}:{cls.__name__}.{name}"
                for name, value in vars(cls).items()
                if inspect.isfunction(value) and re.fullmatch(r"_[a-z]\w*", name)
                if name in inherited
            }
    assert found == {override.ours for override in OVERRIDES}


def is_private_method(node):
    return isinstance(node, ast.FunctionDef) and re.fullmatch(r"_[a-z]\w*", node.name)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.ours)
def test_rewritten_functions_have_not_changed_upstream(rewrite):
    assert callable(resolve(rewrite.ours))
    source = inspect.getsource(resolve(rewrite.upstream))
    digest = hashlib.sha256(source.encode()).hexdigest()[: len(rewrite.digest)]
    assert digest == rewrite.digest, (
        f"{rewrite.upstream} has changed: compare it with {rewrite.ours}, then write {digest} into "
        "torchtitan_lr/compat/overrides.py"
    )
