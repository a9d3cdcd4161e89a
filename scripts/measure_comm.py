# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count the collectives of one training step, and print them beside the formulas.

python scripts/measure_comm.py CONFIG [--json] [--section.key=value ...]

CONFIG is a TOML file of ./run_llama_train.sh; further arguments override it. The step runs for
real, on NGPU ranks (default 4) of this machine: GPUs, or gloo processes where there is none.
Elements are those of the logical tensor, once per call. `block` is one decoder block, where all are
alike; elsewhere the blocks have rows of their own. Formulas describe the model; the scalars of the
scope `step` (clipping, logging) have none.

Exit status: 0 all rows agree, 1 some differ or the run failed, 2 the configuration is refused.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchtitan_lr.cli import OneLineParser, text_table
from torchtitan_lr.errors import ConfigError

RESULT = "TORCHTITAN_LR_COMM_RESULT"
"""Environment variable that makes this a rank: where rank 0 leaves the table."""

QUIET = [
    "--training.steps=1",
    "--lr_scheduler.warmup_steps=0",
    "--validation.no_enable",
    "--checkpoint.no_enable",
    "--metrics.no_enable_tensorboard",
    "--metrics.no_enable_wandb",
]
"""What a single step needs to leave nothing behind."""

KEYS = ("scope", "pass", "op", "mesh_dim", "dtype", "calls", "elements", "bytes")


def measure(arguments: list[str]) -> list[dict[str, Any]]:
    """Run one step on this rank of a started run.

    Args:
        arguments: As of a training run.

    Returns:
        The ledger's rows with the formulas' numbers.
    """
    import torchtitan_lr.specs  # noqa: F401
    from torchtitan_lr.comm.comparison import compare
    from torchtitan_lr.comm.ledger import ledger_for
    from torchtitan_lr.config_checks import build_job_config
    from torchtitan_lr.train import Trainer

    trainer = Trainer(build_job_config(arguments))
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step = 1
    with ledger_for(trainer.parallel_dims, trainer.model_parts) as ledger:
        trainer.train_step(batches)
    table = compare(ledger.rows(), expected_traffic(trainer), role_dtypes(trainer))
    trainer.close()
    return table


def expected_traffic(trainer: Any) -> list[Any]:
    """Return the formulas' rows for one step of a trainer."""
    from dataclasses import replace

    from torchtitan_lr.analysis.communication import model_traffic
    from torchtitan_lr.analysis.data_parallel import DataParallel, data_parallel_traffic
    from torchtitan_lr.parallel.compression_settings import compresses
    from torchtitan_lr.parallel.data_parallel import optimizer_owns_replicas, reshard_after_forward
    from torchtitan_lr.parallel.tensor_parallel import settings_for

    config, dims = trainer.job_config, trainer.parallel_dims
    (model,) = trainer.model_parts
    training, args, k = config.training, model.model_args, trainer.gradient_accumulation_steps
    settings = settings_for(config, args, dims.tp)
    tokens = training.local_batch_size * training.seq_len
    tensor = [
        replace(row, calls=k * row.calls, elements=k * row.elements)
        for row in model_traffic(args, settings, dims.tp, tokens)
    ]
    # What such an optimizer sums over the replicas is in the scope `step`.
    replicas = 1 if optimizer_owns_replicas(config) else dims.dp_replicate
    layout = DataParallel(
        replicas,
        dims.dp_shard,
        reshard_after_forward(config, dims.pp_enabled),
        config.parallelism.fsdp_reshard_after_forward == "always",
        k,
    )
    data = data_parallel_traffic(args, settings, dims.tp, layout)
    return tensor + (compressed_traffic(model, dims, data, k) if compresses(config) else data)


def compressed_traffic(
    model: Any, dims: Any, uncompressed: list[Any], microbatches: int
) -> list[Any]:
    """Return the rows of data parallelism with those of its gradients' codecs put in."""
    from dataclasses import replace

    from torchtitan_lr.comm.scopes import named_scopes
    from torchtitan_lr.parallel.gradient_compression import compressor_of

    crossed = "dp_replicate" if dims.dp_replicate_enabled else "fsdp"
    rows = []
    for row in uncompressed:
        if row.role != "gradient":
            rows.append(row)
        elif row.mesh_dim != crossed:  # only the last micro-batch exchanges gradients
            shares = {"calls": row.calls, "elements": row.elements}
            rows.append(replace(row, **{n: size // microbatches for n, size in shares.items()}))
    # The root's unit is the final norm, which the ledger counts to the head.
    for scope, unit in [*named_scopes(model), ("head", model)]:
        if (compressor := compressor_of(unit)) is not None:
            rows += compressor.traffic(scope, crossed)
    return rows


def role_dtypes(trainer: Any) -> dict[str, str]:
    """Return the name of the dtype in which each kind of tensor travels."""
    from torchtitan_lr.parallel.data_parallel import fsdp_modules

    training = trainer.job_config.training
    wrapped = bool(fsdp_modules(trainer.model_parts))
    compute = training.mixed_precision_param if wrapped else training.dtype
    return {
        "activation": compute,
        "parameter": compute,
        "gradient": training.mixed_precision_reduce,
        "index": "uint8",
        "statistic": "float32",
        "loss": "float32",
    }


def one_block(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Show equal blocks as one, with the scope ``block``."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in table:
        if row["scope"].startswith("block "):
            blocks.setdefault(row["scope"], []).append(row | {"scope": "block"})
    alike = list(blocks.values())
    if not alike or any(block != alike[0] for block in alike):
        return table
    first = next(i for i, row in enumerate(table) if row["scope"].startswith("block "))
    rest = [row for row in table[first:] if not row["scope"].startswith("block ")]
    return [*table[:first], *alike[0], *rest]


def run_ranks(arguments: list[str]) -> list[dict[str, Any]]:
    """Start all ranks of this machine, wait, and return the table.

    Args:
        arguments: As of a training run.

    Raises:
        ConfigError: If the configuration cannot run.
        RuntimeError: If a rank failed.
    """
    from torchtitan_lr.config_checks import build_job_config, check_job_config
    from torchtitan_lr.environment import find_device, read_environment

    environment = read_environment()
    device_type = find_device(environment)
    config = build_job_config(arguments)
    check_job_config(config, environment.ranks, device_type)
    if config.parallelism.pipeline_parallel_degree > 1:
        key = "parallelism.pipeline_parallel_degree"
        raise ConfigError(key, config.parallelism.pipeline_parallel_degree, "1 for this script")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "table.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={environment.ranks}", __file__),
            *(*arguments, f"--job.dump_folder={folder}"),
        ]
        variables = {"OMP_NUM_THREADS": "1"} | os.environ | {RESULT: str(result)}
        if device_type == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""  # fewer GPUs than ranks
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode != 0 or not result.exists():
            raise RuntimeError(done.stderr.strip() or "the ranks ended without a result")
        table: list[dict[str, Any]] = json.loads(result.read_text())
    return table


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    if RESULT in os.environ:
        table = measure(argv)
        if int(os.environ["RANK"]) == 0:
            Path(os.environ[RESULT]).write_text(json.dumps(table))
        return 0
    parser = OneLineParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options, overrides = parser.parse_known_args(argv)
    try:
        table = run_ranks([f"--job.config_file={options.config}", *overrides, *QUIET])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    from torchtitan_lr.comm.comparison import differences

    rows = one_block(table)
    print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    return 1 if list(differences(table)) else 0


def as_text(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out as a table; a formula's number is shown as = where it agrees."""
    lines = []
    for row in rows:
        pairs = (("calls", "expected_calls"), ("elements", "expected_elements"))
        wanted = [_beside(row[measured], row[expected]) for measured, expected in pairs]
        lines.append([*(str(row[key]) for key in KEYS), *wanted])
    return text_table((*KEYS, "expected calls", "expected elements"), lines, left=5)


def _beside(measured: int, expected: int | None) -> str:
    if expected is None:
        return "-"
    return "=" if measured == expected else str(expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
