# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the race's methods refuse."""

import pytest
from torch import nn

from scripts.research.race.diloco import fragments_of
from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError


def check(name, options, world=2):
    """Check a run on so many replicas, unless the options say otherwise."""
    file = ROOT / "train_configs" / "debug_small.toml"
    common = [
        *("experimental.custom_import=scripts.research.race.rivals", f"optimizer.name={name}"),
        *("optimizer.tsr_rank=12", "optimizer.tsr_embedding_rank=12", "model.name=llama_full"),
        *(f"{REPLICATE}={world}", "training.local_batch_size=4"),
        f"training.global_batch_size={4 * world}",
    ]
    arguments = [f"job.config_file={file}", *common, *options]
    config = build_job_config([f"--{argument}" for argument in arguments])
    check_job_config(config, world, "cpu", on_paper=True, data="none")


WITHOUT = "checkpoint.no_enable"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SKIPS = "training.max_skipped_steps=1"
BF16 = "training.mixed_precision_reduce=bfloat16"
ONE_SIDED = "optimizer.tsr_projection=one_sided"

REFUSED = [
    *((name, [f"{REPLICATE}=1"], REPLICATE) for name in ("PowerSGD-4", "DiLoCo-16")),
    ("DiLoCo-16", [WITHOUT, BF16], "training.mixed_precision_reduce"),
    ("PowerSGD-4", [BF16], "training.mixed_precision_reduce"),
    ("DiLoCo-16", [], "checkpoint.enable"),
    ("StreamingDiLoCo-16", [WITHOUT, "model.flavor=tiny"], "model.flavor"),
]


@pytest.mark.parametrize(("name", "options", "key"), REFUSED)
def test_what_a_method_does_not_fit_is_refused_in_one_line(name, options, key):
    with pytest.raises(ConfigError) as error:
        check(name, options)
    text = str(error.value)
    assert text.startswith(f"{key}: got ") and "\n" not in text
    assert f"with optimizer.name = {name!r}" in text


ACCEPTED = [
    ("PowerSGD-4", ["training.global_batch_size=32"]),
    ("DiLoCo-16", [WITHOUT, SKIPS, "model.flavor=tiny"]),
    ("StreamingDiLoCo-16", [WITHOUT]),
    ("TSRAdam", [ONE_SIDED, BF16]),
    ("AdamW", [BF16, SKIPS]),
]


@pytest.mark.parametrize(("name", "options"), ACCEPTED)
def test_what_a_method_fits_is_not_refused(name, options):
    check(name, options, world=4)


@pytest.mark.parametrize("blocks", range(4, 14))
def test_fragments_are_as_many_as_asked_and_hold_a_model_once(blocks):
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(blocks)})
    model.tok_embeddings, model.norm, model.output = (nn.Linear(1, 1) for _ in range(3))
    fragments = fragments_of(model, 4)
    in_order = [model.tok_embeddings, *model.layers.values(), model.norm, model.output]
    assert [part for fragment in fragments for part in fragment] == in_order
    sizes = [sum(part in model.layers.values() for part in fragment) for fragment in fragments]
    assert len(sizes) == 4 and max(sizes) - min(sizes) <= 1
