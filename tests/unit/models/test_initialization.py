# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.tiny import FAMILIES, build_tiny, tiny_args
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.models.llama import LlamaModel


def test_private_rows_start_larger_by_the_root_of_the_lanes():
    wide = {"dim": 64, "ffn_dim": 128}
    ordinary = dict(build_tiny("full", **wide).named_parameters())
    lanes = build_tiny("full", lanes=4, sync_fraction=0.25, **wide)
    scaled = 0
    for name, parameter in lanes.named_parameters():
        expected = ordinary[name].clone()
        if name.endswith((".wo.weight", ".w2.weight")):
            scaled += 1
            expected[int(0.25 * len(expected)) :] *= 2
        assert torch.equal(parameter, expected), name
    assert scaled == 3 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_its_distribution(family):
    wide = {"dim": 256, "ffn_dim": 512, "vocab_size": 512, "n_kv_heads": 2, "n_layers": 2}
    ranks = {"rank_attention": 64, "rank_ffn": 96} if family != "full" else {}
    gate = {"lax_gate": "scalar"} if family == "lax" else {}
    model = build_tiny(family, **wide, **ranks, **gate)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".gate"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 0.02
        if name.endswith((".A.weight", ".B.weight")):
            rank = 64 if "attention" in name else 96
            d_out = (
                512 if "feed_forward" in name else 128 if ".wk" in name or ".wv" in name else 256
            )
            std = rank**-0.25 * (256 + d_out) ** -0.25
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name


def test_model_is_reproducible_whatever_was_drawn_before():
    torch.manual_seed(5)
    one = build_tiny("lax").state_dict()
    torch.randn(100)
    two = build_tiny("lax").state_dict()
    other = build_tiny("lax", init_seed=1).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not any(torch.equal(one[k], other[k]) for k in one if "norm" not in k)


def test_part_and_wrapped_model_get_the_whole_models_weights():
    whole = build_tiny("cola").state_dict()
    part = LlamaModel(tiny_args("cola"))
    del part.layers["0"]
    part.tok_embeddings = None
    part.layers["1"] = checkpoint_wrapper(part.layers["1"])
    part.layers["2"] = torch.compile(part.layers["2"], backend="eager")
    names = {name for name, _ in part.named_parameters()}
    assert any("_checkpoint_wrapped_module" in name for name in names)
    assert any("_orig_mod" in name for name in names)
    part.init_weights()
    for name, value in part.state_dict().items():
        clean = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        assert torch.equal(value, whole[clean]), name


def chunk(full, pieces, index, dim=0):
    """What torch.chunk gives, with nothing for the ranks it has no piece for."""
    parts = full.chunk(pieces, dim)
    return parts[index] if index < len(parts) else full.narrow(dim, 0, 0)


# Ranks that do not divide by four, and gates of one element that most ranks hold nothing of.
UNEVEN = {"lax_gate": "scalar", "n_layers": 2, "rank_attention": 10, "rank_ffn": 14}


def sharded_parameters(rank, mesh_shape, parallelize):
    """Local shards and layouts of a model that a plan has sharded before it was initialized."""
    with fake_process_group(math.prod(mesh_shape), rank):
        with torch.device("meta"):
            model = LlamaModel(tiny_args("lax", **UNEVEN))
        # torch caches by mesh, and equal meshes of two ranks are one to it: so name them apart.
        names = (f"dp{rank}", f"tp{rank}")[: len(mesh_shape)]
        parallelize(model, init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights()
        return {k: (p.to_local().clone(), p.placements) for k, p in model.named_parameters()}


def apply_fsdp(model, mesh):
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def apply_tp_and_fsdp(model, mesh):
    """B by rows, A by columns: both kinds of layout that FSDP2 then shards again along rows."""
    plan = {f"layers.*.attention.w{c}.B": ColwiseParallel() for c in "qkvo"}
    plan |= {f"layers.*.attention.w{c}.A": RowwiseParallel() for c in "qkvo"}
    dp, tp = mesh.mesh_dim_names
    parallelize_module(model, mesh[tp], plan)
    apply_fsdp(model, mesh[dp])


def test_fsdp2_over_tensor_parallel_shards_are_slices_of_the_whole():
    whole = build_tiny("lax", **UNEVEN).state_dict()
    kinds = set()
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        shards = sharded_parameters(rank, (2, 2), apply_tp_and_fsdp)
        for name, (local, placements) in shards.items():
            kinds.add(placements)
            expected = whole[name]
            if ".attention.w" in name and not name.endswith("gate"):
                expected = chunk(expected, 2, tp, 0 if name.endswith("B.weight") else 1)
            assert torch.equal(local, chunk(expected, 2, dp)), name
    # Negative control for the slicing: both two-dimensional layouts did occur.
    assert (_StridedShard(0, split_factor=2), Shard(0)) in kinds
    assert (Shard(0), Shard(1)) in kinds
