# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``estimate``: what it prints and refuses."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.commands import ROOT, Command
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands import train
from torchtitan_lr.commands.estimate_report import alternatives
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import least_ranks
from torchtitan_lr.costs.described_run import elements, read_run
from torchtitan_lr.costs.hardware import DEVICES, MACHINES, load_hardware
from torchtitan_lr.costs.layouts import Modelled
from torchtitan_lr.costs.memory import static_memory
from torchtitan_lr.costs.step_traffic import (
    bytes_by_dim,
    gradient_bytes,
    sent_per_step,
    step_traffic,
)
from torchtitan_lr.optim.entries import ENTRIES

CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
DEBUG = str(ROOT / "train_configs" / "debug_cola.toml")
ONE = "--parallelism.tensor_parallel_degree=1"
BATCH_4 = "--training.local_batch_size=4"
# The same blocks in two tests, so that they are rehearsed once; none of two kinds in turns.
BLOCKS = ["--world=4", "--parallelism.tensor_parallel_degree=2"]
BLOCKS += ["--activation_checkpoint.selective_ac_option=1"]
PLANS = ["full", "vanilla", "btp"]
SELDOM = [f"--optimizer.tsr_{name}refresh_interval=1000" for name in ("", "embedding_")]
KEYS = {"checkpointing", "parameters", "flops_per_token", "memory_bytes", "comm_bytes", "step_time"}


@pytest.fixture(scope="module")
def script():
    return Command("estimate")


def paper_run(path, world=None, *overrides):
    config = build_job_config([f"--job.config_file={path}", *overrides])
    world = least_ranks(vars(config.parallelism)) if world is None else world
    check_job_config(config, world, "cuda", data="paper")
    return read_run(config, world)


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config(path):
    """Parameters and bytes of every TOML that comes with the package."""
    run = paper_run(path)
    whole = sum(elements(unit) for stage in run.stages for unit in stage.values())
    split = elements(run.global_shapes)
    assert split / run.tp <= whole <= split
    traffic = [step_traffic(run, rank) for rank in range(run.pp)]
    sent = [bytes_by_dim(rows, run.wire_dtypes) for rows in traffic]
    used = {name for name in ("tp", "cp", "fsdp", "dp_replicate", "pp") if run.mesh[name].size > 1}
    if run.config.outer.every:
        used.remove("dp_replicate")  # over which an ordinary step sends nothing
    if run.entry.splits_columns and {"tp", "fsdp"} <= used:
        used.add("fsdp_tp")
    assert all(dims.keys() == used for dims in sent)


def test_json(script, capsys):
    assert script.main([DEBUG, *BLOCKS, "--json", "--training.local_batch_size=1"]) == 0
    others = json.loads(capsys.readouterr().out)["columns"]
    report = others.pop("as configured")
    assert report.keys() >= KEYS and report["world"] == 4
    assert others.keys() == {"full", "vanilla", "btp"}
    assert all(column.keys() >= KEYS for column in others.values())
    parts = {
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "working",
        "buffers",
        "graphs",
        "peak",
    }
    assert report["memory_bytes"].keys() == parts
    times = {"compute", "exposed_communication", "hidden_communication", "total", "tokens_per_s"}
    assert report["step_time"].keys() >= times
    # As configured is BTP; vanilla sends more, full rank is larger.
    assert report["comm_bytes"] == others["btp"]["comm_bytes"]
    tensor = [sum(c["comm_bytes"]["tp"].values()) for c in (others["vanilla"], report)]
    assert tensor[0] > 1.5 * tensor[1]
    assert others["full"]["parameters"] > report["parameters"] == others["btp"]["parameters"]


def test_the_step_in_which_tsr_adam_sends_most():
    """At 1B at most 6% of the dense gradients, with the keys of docs/tsr_adam.md, in every step."""
    path = ROOT / "train_configs/tsr_1b.toml"
    spread = ["--optimizer.tsr_compress_head", "--optimizer.tsr_stagger"]
    spread.append("--optimizer.tsr_embedding_refresh_interval=100")
    start = ["--optimizer.tsr_start=random"]
    for keys, expected in (([], (0.758, 0.059)), (start, (0.059, 0.059))):
        run = paper_run(path, 8, *spread, *keys)
        dense = 4 * elements(run.global_shapes)
        kinds = run.optimizer.kinds_of_steps(0)
        peaks = kinds["first"], kinds["largest later"]
        shares = [bytes_by_dim(rows, run.wire_dtypes)["dp_replicate"] for rows in peaks]
        assert [sum(s.values()) / dense for s in shares] == pytest.approx(expected, abs=6e-4)


def test_what_a_mean_step_sends_counts_the_steps_that_differ(monkeypatch):
    """TSR-Adam's refreshes among them; of the optimizer that replaces AdamW and of AdamW itself."""
    replicas = "--parallelism.data_parallel_replicate_degree=4"
    own = ["--optimizer.name=TSRAdam", "--optimizer.tsr_rank=8"]
    run = paper_run(DEBUG, 4, ONE, BATCH_4, replicas, *own)
    told = sent_per_step(run.config, 4)
    seldom = paper_run(DEBUG, 4, ONE, BATCH_4, replicas, *own, "--optimizer.tsr_stagger", *SELDOM)
    usual = gradient_bytes(seldom, 0)
    assert usual < told["sent_bytes"] < told["adamw_bytes"]
    plain = sent_per_step(paper_run(DEBUG, 4, ONE, BATCH_4, replicas).config, 4)
    assert plain["sent_bytes"] == plain["adamw_bytes"] == told["adamw_bytes"]
    # One rank shares no gradients, and of an optimizer from outside there is no formula.
    assert sent_per_step(paper_run(DEBUG, 1, ONE).config, 1) == {}
    monkeypatch.setitem(ENTRIES, "AdamW", replace(ENTRIES["AdamW"], cost=None))
    assert sent_per_step(paper_run(DEBUG, 4, ONE, BATCH_4, replicas).config, 4) == {}


def test_what_outer_steps_send_and_hold():
    """Eight replicas of eight ranks: a message of .53 bytes per parameter every 30 steps."""
    path = ROOT / "train_configs/muloco_1b.toml"
    run = paper_run(path)
    pieces, size = run.pieces_of(0), elements(run.global_shapes)
    entries = elements(pieces)
    coded = sum(-(-math.prod(piece) // 128) for piece in pieces.values()) * (128 * 4 // 8 + 4)
    assert 8 * coded / 30 == pytest.approx(size * (0.5 + 4 / 128) / 30, rel=1e-3)
    kinds = {
        name: sum(bytes_by_dim(rows, run.wire_dtypes).get("dp_replicate", {}).values())
        for name, rows in run.outer.kinds_of_steps(0).items()
    }
    assert kinds == {"ordinary": 0, "exchange": 8 * coded, "average": round(8 * coded / 30)}
    averaged = paper_run(path, None, "--outer.every=0")
    held, usual = (static_memory(each, 0)["optimizer"] for each in (run, averaged))
    assert held - usual == 3 * 4 * entries  # common weights, momentum and residual
    sent, gradients = (gradient_bytes(each, 0) for each in (run, averaged))
    assert gradients - sent == 4 * entries - kinds["average"]
    fragments = paper_run(path, None, "--outer.fragments=3", "--outer.bits=32")
    parts = [row.elements for row in fragments.outer.exchanges(0)]
    assert len(parts) == 3 and sum(parts) == entries
    alone = paper_run(path, 8, "--parallelism.data_parallel_replicate_degree=1")
    assert alone.outer.exchanges(0) == []


@pytest.mark.parametrize("gbytes", [25.0, 1.25])
def test_a_step_hides_a_message_that_travels_meanwhile(gbytes):
    """No more of it than the step computes."""
    hardware = replace(load_hardware("h100_10gbit"), inter_node_gbytes_per_s=gbytes)
    path = ROOT / "train_configs/muloco_1b.toml"
    runs = [paper_run(path, None, *more) for more in ([], ["--outer.overlap"])]
    plain, overlaps = (Modelled(run, hardware).time for run in runs)
    (row,) = runs[0].outer.exchanges(0)
    message = 7 / 8 * row.elements / (gbytes * 1e9) + hardware.latency_us * 1e-6
    computes = plain.compute + plain.element_wise
    hidden = min(message, computes) / 30
    assert (message > computes) is (gbytes < 2)
    assert plain.total - overlaps.total == pytest.approx(hidden, rel=1e-4)
    more = overlaps.hidden_communication - plain.hidden_communication
    assert more == pytest.approx(hidden, rel=1e-4)
    pieces = runs[1].pieces_of(0)
    messages = 9 * row.elements / 8  # its own, and those of all
    assert runs[1].outer.travelling_bytes(pieces) == 4 * elements(pieces) + messages


def test_thousands_of_ranks():
    """BOOST's 30B on 1,024 ranks: exact shards, and BTP faster than the others."""
    path = ROOT / "train_configs" / "boost_30b.toml"
    run = paper_run(path, 1024, "--training.global_batch_size=-1")
    assert (run.tp, run.shard) == (8, 128)
    held = static_memory(run, 0)
    parameters = elements(run.global_shapes)
    assert 4 * parameters / 1024 < held["weights"] < 1.01 * 4 * parameters / 1024 + 4 * 36 * 8192
    machine = load_hardware("h100")
    times = {n: Modelled(other, machine).time.total for n, other in alternatives(run, PLANS)}
    assert times["btp"] < min(times["full"], times["vanilla"])


SHARES = re.findall(
    r"(\d+)%[^%]*? and (\d+)%[^%]*? at (\d+[MB])",
    (ROOT / "README.md").read_text().partition("\n| family")[0],
)


def test_the_shares_of_readme():
    """README divides what ``estimate`` prints for CoLA by what it prints for full rank."""
    assert [size for *_, size in SHARES] == ["60M", "350M", "7B"]
    for *said, size in SHARES:
        cola = paper_run(f"cola_{size.lower()}")
        pair = cola, dict(alternatives(cola, PLANS))["full"]
        low, full = (run.size for run in pair)
        assert [f"{100 * a / b:.0f}" for a, b in zip(low, full, strict=True)] == said


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.toml")), ids=lambda path: path.stem)
def test_machines(path):
    machine = load_hardware(path.stem)
    assert machine == load_hardware(str(path))
    base = load_hardware(machine.like) if machine.like else machine
    assert machine.kernel_us == base.kernel_us > 0
    assert machine.intra_node_gbytes_per_s > machine.inter_node_gbytes_per_s > 0
    assert 100 < machine.peak_tflops < 1000 and 0.3 < machine.matmul_efficiency < 1


GOOD = (MACHINES / "h100.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colour = 'green'\n" + GOOD], "machine.toml: colour: got 'green'"),
        ([GOOD.replace("= 80.0", "= nan")], "machine.toml: memory_gib: got nan"),
        ([GOOD.replace("node = 8", "node = 8.5")], "machine.toml: devices_per_node: got 8.5"),
        ([GOOD.replace("= 80.0", f"= {'9' * 5000}")], "expected valid TOML"),
        (["like = 'own.toml'\n" + GOOD], "machine.toml: like: got 'own.toml'"),
        ([None, "--hardware=b300"], "one of a100_80g_nvlink"),
        ([None, "--training.sequence=3"], "training.sequence"),
        ([None, "--plans=full,btq"], "--plans: got 'btq', expected one of full, btp, vanilla"),
        ([None, DEBUG], "CONFIG: got"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments, message, tmp_path, script, capsys):
    """Of a machine's file, and of arguments."""
    text, *others = arguments
    path = tmp_path / "machine.toml"
    if text is not None:
        path.write_text(text)
        others = [f"--hardware={path}"]
    assert script.main([DEBUG, *others]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_says_what_it_is_modelled_to_take(monkeypatch, capsys, tmp_path):
    """On the GPUs of a shipped file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train.gpu_name() == ""
    options = [f"--job.config_file={DEBUG}", ONE, "--training.global_batch_size=-1"]
    config, alone = build_job_config(options), SimpleNamespace(world_size=1)
    placed = SimpleNamespace(config=config, environment=alone, device="cuda")

    def told(name):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{name}'\necho 'Another'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        train.tell_modelled(placed)
        return capsys.readouterr().out

    line = r"H200 SXM, NVLink, modelled: [\d.e-]+ days, \d+% MFU, \d+% of 141 GiB\n$"
    assert re.match(line, told("NVIDIA H200"))
    assert told("Tesla T4") == told("") == ""
    placed.device = "cpu"
    assert told("NVIDIA H200") == ""
    assert {(MACHINES / f"{name}.toml").is_file() for name in DEVICES.values()} == {True}
