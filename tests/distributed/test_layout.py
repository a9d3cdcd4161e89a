# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What must hold in every layout, for combinations drawn from the table of what works with what.

Each trains like one process, sends and holds what the estimate says, resumes bitwise, goes on in a
neighbouring layout, and a rejected step leaves no trace. A run of the suite takes pairs that failed
before, and every value once; ``--full`` all pairs. The debug files and `measure-comm` follow.
"""

import json
import keyword
import random
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import torchtitan_lr.training.register  # noqa: F401
from tests.commands import ROOT
from tests.distributed.training import train
from tests.support import layout_runs
from tests.support.nightly import nightly
from tests.support.parity_runs import (
    DEEP,
    EXACT,
    ROUNDING,
    ROUNDING_OF_POLAR_FACTORS,
    TINY,
    bf16_references,
    largest_difference,
    rounding_excess,
    use_float64,
)
from tests.support.rank_pool import RankPool
from tests.support.support_matrix import NONE, Combination, SupportMatrix, neighbour, world_size
from torchtitan_lr.commands import measure_comm
from torchtitan_lr.commands.main import main
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs import tsr_messages
from torchtitan_lr.costs.described_run import Run, read_run
from torchtitan_lr.costs.memory import static_memory
from torchtitan_lr.costs.messages import Traffic
from torchtitan_lr.costs.optimizer_costs import TSRCost
from torchtitan_lr.costs.rehearsal import rehearse_run
from torchtitan_lr.costs.step_traffic import bytes_by_dim, compare, differences, step_traffic
from torchtitan_lr.launch.placement import fit
from torchtitan_lr.ledger.ledger import COUNTS

MATRIX = SupportMatrix()
USUAL = [
    # Each lets ranks meet in a way that was wrong once, in full precision.
    {
        **{"family": "lax_gated", "tensor": "btp_sequence", "context": "latents"},
        **{"checkpointing": "low_rank", "text": "documents"},
    },
    {
        **{"family": "cola", "tensor": "btp_sequence", "pipeline": "GPipe"},
        **{"optimizer": "lora_muon", "rates": "groups"},
    },
    {"family": "cola", "tensor": "btp_ungrouped", "context": "latents"},
    {"family": "svd", "data": "fsdp", "context": "latents", "checkpointing": "selective_op"},
    {"family": "lax", "context": "latents", "pipeline": "ZBVZeroBubble", "text": "documents"},
    {"family": "caat", "tensor": "caat", "context": "shared", "checkpointing": "selective_op"},
    {"family": "caat", "tensor": "caat", "pipeline": "ZBVZeroBubble"},
    {"family": "caat", "tensor": "caat", "data": "replicas", "optimizer": "tsr"},
    {"family": "full", "data": "hsdp", "accumulation": "twice", "optimizer": "tsr_staggered"},
    {"family": "cola", "data": "replicas", "optimizer": "tsr_one_sided", "text": "pairs"},
    {"family": "cola", "data": "fsdp", "tensor": "vanilla", "optimizer": "spectron"},
    {"family": "full", "data": "fsdp", "tensor": "megatron", "optimizer": "muon"},
    {
        **{"family": "lax", "data": "fsdp", "accumulation": "twice"},
        **{"optimizer": "lora_muon", "text": "mixture", "outer": "steps"},
    },
    {
        **{"family": "full", "data": "hsdp", "accumulation": "twice"},
        **{"codec": "sketch", "checkpointing": "selective_block"},
    },
    {"family": "full", "data": "hsdp", "codec": "sparse"},
    {"family": "lax", "data": "replicas", "pipeline": "1F1B", "accumulation": "twice"},
    {"family": "lax", "tensor": "vanilla", "pipeline": "1F1B", "checkpointing": "full"},
    {"family": "svd", "tensor": "btp", "compile": "blocks"},
    {"family": "cola", "context": "shared", "compile": "blocks", "checkpointing": "low_rank"},
    # What is left, on two ranks.
    {"family": "lax", "pipeline": "Interleaved1F1B"},
    {"family": "full", "tensor": "megatron_sequence"},
    {"family": "lax_gated", "tensor": "vanilla_replicated", "precision": "bf16"},
    {"family": "cola", "data": "replicas", "precision": "bf16_wire", "optimizer": "tsr"},
]
"""Pairs of values that failed before, and every value."""

EIGHT_RANKS = {"family": "svd", "data": "hsdp", "pipeline": "GPipe", "accumulation": "twice"}
"""It failed before, too; ``--full`` has it."""

LOSSY = ("sparse",)
"""Codecs that send a part of the gradient, so that no one process trains like them."""

SPECTRAL = ("muon", "spectron", "lora_muon")


def lengths(saved: int) -> list[str]:
    """Return the arguments of a run whose second half is resumed."""
    options = ["training.steps", "checkpoint.interval", "validation.freq"]
    return [f"--{o}={n}" for o, n in zip(options, (2 * saved, saved, saved), strict=True)]


RUN = [
    *lengths(1),
    "--lr_scheduler.warmup_steps=0",
    "--training.max_skipped_steps=1",
    "--checkpoint.enable",
    "--validation.enable",
    "--validation.steps=-1",
    "--validation.seq_len=8",  # of another length than in training
    "--validation.local_batch_size=3",  # which fills no micro-batch
]
LONG = "--training.seq_len=64"
"""Enough tokens that the embedding's gradient has more entries than a codec sends."""

GROUPS = r"""
[[optimizer.groups]]  # not on the last stage
pattern = 'embeddings|layers\.0\..*\.A\.'
lr_multiplier = 3
[[optimizer.groups]]  # not on the first one
pattern = 'layers\.1.*norm|output'
lr_multiplier = 0.25
weight_decay_multiplier = 0
"""
MIXTURE = """
[[training.mixture]]
dataset = "python_stdlib"
weight = 2
[[training.mixture]]
dataset = "local"
path = "{path}"
"""


def name(combination: Combination) -> str:
    return "-".join(value for value in combination.values() if value != NONE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        draws = [dict.fromkeys(MATRIX.axes, NONE) | values for values in USUAL]
        if metafunc.config.getoption("--full"):
            draws.append(dict.fromkeys(MATRIX.axes, NONE) | EIGHT_RANKS)
            draws += MATRIX.every_draw
        metafunc.parametrize("combination", draws, ids=name)


def test_every_value_is_used() -> None:
    used = {item for values in USUAL for item in values.items()}
    values = {(axis, value) for axis, values in MATRIX.axes.items() for value in values}
    assert {item for item in values - used if item[1] != NONE} == set()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, pairs of which many have few labels, and 7 validation sequences."""
    folder = tmp_path_factory.mktemp("texts")
    source = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(source.choice(keyword.kwlist) for _ in range(source.randint(least, most)))

    documents = [{"text": words(2, 9)} for _ in range(300)]
    pairs = [{"prompt": words(1, 4), "completion": " " + words(1, 12)} for _ in range(300)]
    held_out = [{"text": f"def power{i}(x, y):\n    return x ** {i} + {7 * i}\n"} for i in range(3)]
    for file, records in {"documents": documents, "pairs": pairs, "held_out": held_out}.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{file}.jsonl").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def options(texts: Path, pytestconfig: pytest.Config) -> Callable[[Combination], list[str]]:
    """Return the arguments of a combination that one process has too, besides the matrix's."""

    def of(combination: Combination) -> list[str]:
        found = [*RUN, "--validation.dataset=local"]
        # TSR-Adam refreshes in the second half.
        if combination["optimizer"].startswith("tsr") or pytestconfig.getoption("--full"):
            found += lengths(2)
        found.append(f"--validation.dataset_path={texts}/held_out.jsonl")
        if combination["pipeline"] in ("Interleaved1F1B", "ZBVZeroBubble"):
            found += DEEP
        if combination["codec"] != NONE:
            found.append(LONG)
        if combination["text"] in ("documents", "pairs"):
            path = f"{texts}/{combination['text']}.jsonl"
            found += ["--training.dataset=local", f"--training.dataset_path={path}"]
        tables = GROUPS if combination["rates"] == "groups" else ""
        if combination["text"] == "mixture":
            tables += MIXTURE.format(path=texts / "documents.jsonl")
        if tables:
            file = texts / f"{combination['text']}-{combination['rates']}.toml"
            file.write_text(tables)
            found.append(f"--job.config_file={file}")
        return found

    return of


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Callable[[int], RankPool]:
    names = {1: "one_rank", 2: "two_ranks", 4: "four_ranks", 8: "eight_ranks"}
    return lambda ranks: request.getfixturevalue(names[ranks])


@pytest.fixture(scope="module")
def alone(pool: Callable[[int], RankPool]) -> Callable[..., dict[str, Any]]:
    """What these arguments train on so many ranks, mostly one, once for all combinations."""

    @cache
    def run(ranks: int, *arguments: str) -> dict[str, Any]:
        return pool(ranks).run(layout_runs.run, list(arguments))[0]

    return run


@pytest.fixture(scope="module")
def rounding(pool: Callable[[int], RankPool]) -> Callable[..., list[dict[str, Any]]]:
    """The same in fp64, with still weights, and in bf16."""

    @cache
    def run(ranks: int, *arguments: str) -> list[dict[str, Any]]:
        return bf16_references(pool(ranks), list(arguments), layout_runs.run)

    return run


def test_what_holds_in_every_layout(
    combination: Combination,
    options: Callable[[Combination], list[str]],
    pool: Callable[[int], RankPool],
    alone: Callable[..., dict[str, Any]],
    rounding: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    common = options(combination)
    arguments = [*common, *MATRIX.arguments(combination, "eager")]
    same = MATRIX.reference(combination | {"precision": NONE})
    reference = [world_size(same), *common, *MATRIX.arguments(same)]
    exact = combination["precision"] == NONE
    # They are slow on a CPU.
    masks = combination["text"] == "documents" and combination["context"] == "latents"
    masks = masks and combination["compile"] == combination["pipeline"] == NONE
    other = str(tmp_path / "other")
    ranks = pool(world_size(combination)).run(layout_runs.examine, arguments, other, masks)

    run, lossy = ranks[0], combination["codec"] in LOSSY and compresses(combination)
    if exact:
        check_parity(run, alone(*reference), lossy)
    elif not lossy and combination["outer"] == NONE:
        check_rounding(run, rounding(*reference), combination["optimizer"] in SPECTRAL)
    # Rank 0 writes, whichever rank has the last stage; every rank knows the result.
    assert {rank["last_val_loss"] for rank in ranks} == {run["val_losses"][-1]}
    check_sent_and_held(ranks, arguments)
    assert run["resumed"] == {"difference": 0.0, "logged": True}
    check_rejected(ranks, combination)
    check_neighbour(combination, options, pool, run, other, exact and not lossy)


def compresses(combination: Combination) -> bool:
    """Whether FSDP2 has ranks, so that a codec has something to do."""
    return (
        combination["codec"] != NONE and not combination["data"] == combination["context"] == NONE
    )


def check_parity(run: dict[str, Any], expected: dict[str, Any], lossy: bool) -> None:
    """Losses, gradients, their norms, validation, and weights after some steps."""
    assert run["tokens"] == expected["tokens"]
    assert run["losses"][0] == pytest.approx(expected["losses"][0], rel=EXACT)
    if lossy:
        assert largest_difference(run, expected) > 1e-3
        return
    found, gradients = run["first"]["gradients"], expected["first"]["gradients"]
    assert found.keys() == gradients.keys()
    assert all(relative(found[name], value) < EXACT for name, value in gradients.items())
    # The first validation of replicas that train apart is of their own weights and rows.
    assert run["val_losses"][-1] == pytest.approx(expected["val_losses"][-1], rel=EXACT)
    assert len(run["val_losses"]) == 2
    assert largest_difference(run, expected) < EXACT


def relative(found: Any, expected: Any) -> float:
    return float(abs(found - expected).max() / max(abs(expected).max(), 1e-30))


def check_rounding(run: dict[str, Any], references: list[dict[str, Any]], spectral: bool) -> None:
    """After one step; later ones in bf16 go apart."""
    found, *known = ({"parameters": r["first"]["parameters"]} for r in (run, *references))
    if spectral:
        assert rounding_excess(found, known, floor=max) < ROUNDING_OF_POLAR_FACTORS
    else:
        assert rounding_excess(found, known) < ROUNDING


def on_paper(arguments: list[str], ranks: int) -> tuple[Run, dict[str, str]]:
    """Return the run of the estimates, and the dtype of each role."""
    config = build_job_config([*TINY, *arguments])
    use_float64(config)
    paper, wide = read_run(config, ranks), config.training.dtype == "float64"
    dtypes = paper.wire_dtypes
    if wide:
        dtypes = {role: name.replace("float32", "float64") for role, name in dtypes.items()}
    return paper, dtypes


def check_sent_and_held(ranks: list[dict[str, Any]], arguments: list[str]) -> None:
    """Every message of the first step, and the memory after it, on every rank."""
    paper, dtypes = on_paper(arguments, len(ranks))
    repeats = paper.tp > 1 and paper.checkpointing != "none"
    rehearsal = rehearse_run(paper) if repeats or paper.pp > 1 else None
    if rehearsal and paper.settings.plan == "btp" and paper.checkpointing == "low_rank":
        assert rehearsal.sent_again == []
    for rank in ranks:
        check_memory(rank, paper)
        stage, rows = rank["ranks"]["pp"], rank["sent"][0]
        expected = [row for row in step_traffic(paper, stage, rehearsal) if row.scope != "step"]
        exchanged = [row for row in rank["sent"][-1] if row["scope"] == "outer"]
        assert not differences(compare(exchanged, paper.outer.exchanges(stage), dtypes))
        if repeats and paper.config.compile.enable:
            continue  # the backend of these tests recomputes all of a compiled block
        if isinstance(paper.optimizer, TSRCost):
            # The verdict of a step is a sum over all ranks, which may be one dimension's.
            if len(ranks) not in paper.ranks.values():
                check_exchange(rank, paper, expected, dtypes)
        elif paper.pp > 1:  # what is sent again has no block, and sums run after all passes
            sent = counted_bytes(row for row in rows if row["scope"] != "step")
            assert sent == bytes_by_dim(expected, dtypes)
            between = [row for row in rows if row["scope"].startswith("boundary")]
            stated = [row for row in expected if row.scope.startswith("boundary")]
            assert between and not differences(compare(between, stated, dtypes))
        else:
            wrong = differences(compare(rows, expected, dtypes))
            # The head sends the same numbers in a message for each chunk.
            same = [row for row in wrong if row["elements"] == row["expected_elements"]]
            wrong = [row for row in wrong if row["scope"] != "head" or row not in same]
            assert not wrong, "\n".join(map(str, wrong))


def check_exchange(
    rank: dict[str, Any], paper: Run, others: list[Traffic], dtypes: dict[str, str]
) -> None:
    """The bytes of every step of TSR-Adam: cores, dense gradients, and what refreshes need."""
    stage = rank["ranks"]["pp"]
    cost = paper.optimizer
    assert isinstance(cost, TSRCost)
    plans = cost.plans_of(stage)
    done = [0] * len(plans)
    for step, rows in enumerate(rank["sent"]):
        due = [index for index, plan in enumerate(plans) if plan.is_due(step, done[index])]
        for index in due:
            done[index] += 1
        with patch.object(tsr_messages, "BUCKET", layout_runs.BUCKET):
            stated = bytes_by_dim([*others, *cost.sent(stage, due)], dtypes)
        of_mesh = [row for row in rows if row["mesh_dim"] in paper.mesh]
        # Stages greet each other before the first step.
        own = [row for row in of_mesh if (row["scope"], row["mesh_dim"]) != ("step", "pp")]
        assert counted_bytes(own) == stated, step


def counted_bytes(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Sum a ledger's bytes by mesh dimension and operation."""
    sent: dict[str, dict[str, int]] = {}
    for row in rows:
        operations = sent.setdefault(row["mesh_dim"], {})
        operations[row["op"]] = operations.get(row["op"], 0) + row["bytes"]
    return sent


def check_memory(rank: dict[str, Any], paper: Run) -> None:
    expected = static_memory(paper, rank["ranks"]["pp"], rank["ranks"]["fsdp"])
    held = rank["first"]["held"]
    if isinstance(paper.optimizer, TSRCost):  # it drops gradients of compressed matrices
        assert held.pop("gradients") <= expected.pop("gradients")
    assert held == {part: expected[part] for part in held}


def check_rejected(ranks: list[dict[str, Any]], combination: Combination) -> None:
    for rank in ranks:
        assert rank["rejected"]["changed"] == [] and rank["rejected"]["trains"]
    (warning,) = {text for rank in ranks for text in rank["rejected"]["warnings"]}
    alone = all(combination[axis] == NONE for axis in ("tensor", "context"))
    ranks_named = "(rank 1: layers." if alone else ": layers."
    assert "gradient norm is nan (" in warning and ranks_named in warning


def check_neighbour(
    combination: Combination,
    options: Callable[[Combination], list[str]],
    pool: Callable[[int], RankPool],
    run: dict[str, Any],
    folder: str,
    equal: bool,
) -> None:
    """A checkpoint goes on with one dimension of the mesh less."""
    near = neighbour(MATRIX, combination)
    arguments = [*options(combination), *MATRIX.arguments(near, "eager"), "--validation.no_enable"]
    ranks = pool(world_size(near))
    if compresses(near):
        for error in ranks.errors(layout_runs.go_on, arguments, folder):
            assert "goes on without its grad_compression" in error, error
        return
    resumed = ranks.run(layout_runs.go_on, arguments, folder)[0]
    assert resumed["step"] == run["step"]
    if equal:
        assert largest_difference(resumed, run) < EXACT


@pytest.mark.parametrize(
    "name", ["cola", *nightly("finetune", "tsr", "full", "svd", "lax", "caat")]
)
def test_a_debug_file_has_the_same_losses_on_any_ranks(
    name: str, one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    short = [*TINY, "--model.flavor=debug", "--training.global_batch_size=16"]
    arguments = [*short, f"--job.config_file={ROOT}/train_configs/debug_{name}.toml"]
    config, losses = build_job_config(arguments), []
    for ranks, pool in ((1, one_rank), (2, two_ranks), (4, four_ranks)):
        fitted = fit(config, arguments, ranks)
        assert fitted is not None
        losses.append(pool.run(train, [*arguments, *fitted])[0]["losses"])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=EXACT)


def test_measure_comm(
    four_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a real step of the trainer: every row agrees, and has the promised keys."""
    step = partial(four_ranks.run, measure_comm.measure)
    monkeypatch.setattr(measure_comm, "run_on_ranks", lambda _, arguments, __: step(arguments)[0])
    monkeypatch.setenv("NGPU", "4")
    # Checkpointing that repeats collectives.
    options = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    assert main(["measure-comm", "debug_lax", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    numbers = {*COUNTS, "expected_calls", "expected_elements"}
    assert all(row.keys() == {"scope", "pass", "op", "mesh_dim", "dtype"} | numbers for row in rows)
    assert {row["scope"] for row in rows} == {"embedding", "block", "head", "step"}
    assert {row["mesh_dim"] for row in rows if row["scope"] == "block"} == {"fsdp", "tp"}
