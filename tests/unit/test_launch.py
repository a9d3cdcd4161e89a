# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher, with a small real program in place of the training (torchtitan's TRAIN_FILE)."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_lr import launch
from torchtitan_lr.environment import find_device
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.processes import child_pids
from torchtitan_lr.report import describe_failure, killed_rank, read_summary, summary_lines

ROOT = Path(__file__).resolve().parents[2]

STANDIN = """
import json, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
mode, rank = os.environ["STANDIN"], os.environ.get("RANK", "0")
folder = Path(next(a for a in sys.argv if a.startswith("--job.dump_folder=")).partition("=")[2])
stop = []
if mode != "deaf":
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
(folder / f"pid{rank}").write_text(str(os.getpid()))
print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
print("ready", rank, flush=True)
print("a warning", file=sys.stderr, flush=True)
if mode == "refuse":
    if rank == "0":
        print("error: some.key: got 1, expected 2", file=sys.stderr)
    else:
        time.sleep(3)
    sys.exit(2)
if mode == "stagger" and rank == "0":
    time.sleep(2.5)
    sys.exit(0)
end = time.time() + (0 if mode in ("end", "fail") else 60)
while time.time() < end and (not stop or mode == "stubborn"):
    time.sleep(0.02)
if mode == "fail" and rank == "1":
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def boom():
        raise ValueError("no such luck\\nsecond line")
    boom()
if mode == "end" and rank == "0":
    (folder / "summary.json").write_text(json.dumps({"steps": 3, "train_loss": 2.5, "mfu": None}))
if stop and rank == "0":
    print("INFO - Stopped by SIGTERM after step 3 of 9: resume so", file=sys.stderr, flush=True)
(folder / f"saved{rank}").write_text("")
"""


class Launch:
    """A launcher in a process of its own."""

    def __init__(self, folder, mode, ranks=2, **variables):
        (folder / "standin.py").write_text(STANDIN)
        self.folder = folder
        environment = dict(os.environ) | {
            "PYTHONPATH": f"{ROOT}:{folder}",
            "TRAIN_FILE": "standin",
            "STANDIN": mode,
            "NGPU": str(ranks),
            "CONFIG_FILE": str(ROOT / "train_configs" / "debug_cola.toml"),
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_lr.launch", f"--job.dump_folder={folder}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ranks = ranks

    def wait_for_ranks(self):
        end = time.time() + 120
        while not all((self.folder / f"pid{rank}").exists() for rank in range(self.ranks)):
            assert time.time() < end and self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def finish(self):
        self.out, self.err = self.process.communicate(timeout=120)
        return self.process.returncode

    def rank_pids(self):
        return [int((self.folder / f"pid{rank}").read_text()) for rank in range(self.ranks)]

    def saved(self):
        return sorted(path.name for path in self.folder.glob("saved*"))


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


def gone(pids, seconds=20):
    end = time.time() + seconds
    while any(map(alive, pids)) and time.time() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_ranks_save_and_ends_well(tmp_path, number):
    run = Launch(tmp_path, "wait")
    run.wait_for_ranks()
    time.sleep(0.2)
    run.process.send_signal(number)
    assert run.finish() == 0
    assert run.saved() == ["saved0", "saved1"]
    assert gone(run.rank_pids())
    assert "Traceback" not in run.err
    # The ranks' own lines and nothing else.
    assert all(line.startswith("[rank0]:") for line in (run.out + run.err).splitlines())


def test_a_rank_that_cannot_save_is_no_success(tmp_path):
    """The control: without a handler nothing is saved, and the launcher must not say it was."""
    run = Launch(tmp_path, "deaf")
    run.wait_for_ranks()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 143
    assert run.saved() == []
    assert gone(run.rank_pids())
    last = run.err.splitlines()[-1]
    assert last.startswith("error: stopped before training began by SIGTERM; logs: ")
    assert "Traceback" not in run.err


def test_a_second_signal_kills(tmp_path):
    run = Launch(tmp_path, "stubborn")
    run.wait_for_ranks()
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert run.process.poll() is None  # it is waiting for the ranks to save
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    assert run.saved() == []
    assert gone(run.rank_pids())
    assert run.err.splitlines()[-1].startswith("error: killed by SIGINT; logs: ")


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_launcher_leaves_no_ranks(tmp_path):
    run = Launch(tmp_path, "deaf")
    run.wait_for_ranks()
    pids = run.rank_pids()
    assert all(map(alive, pids))
    run.process.kill()
    run.finish()
    assert gone(pids, seconds=60)


def test_a_failing_rank(tmp_path):
    run = Launch(tmp_path, "fail")
    assert run.finish() == 1
    last = run.err.splitlines()[-1]
    assert last.startswith("error: rank 1 failed: ValueError: no such luck; its output: ")
    folder = Path(last.rpartition(": ")[2])
    assert "second line" in (folder / "stderr.log").read_text()
    # torchrun's own words are in the log, not on the console.
    assert "ChildFailedError" not in run.err
    log = next((tmp_path / "logs").glob("*/launcher.log"))
    assert "ChildFailedError" in log.read_text()


def test_success_ends_with_the_summary(tmp_path):
    run = Launch(tmp_path, "end", OMP_NUM_THREADS="")
    assert run.finish() == 0, run.err
    lines = run.out.splitlines()
    assert "[rank0]:ready 0" in lines
    assert not any("ready 1" in line for line in lines)
    cores = len(os.sched_getaffinity(0))
    assert f"[rank0]:threads {max(1, cores // 2)}" in lines
    text = "\n".join(line for line in lines if not line.startswith("["))
    assert "train loss             2.5000 nats/token" in text
    assert "unknown peak" in text
    folder = next((tmp_path / "logs").iterdir())
    assert str(folder) in text
    assert len(list(folder.glob("*/attempt_0/*/stdout.log"))) == 2


def test_dry_run_is_one_process(tmp_path):
    run = Launch(tmp_path, "end", ranks=4, COMM_MODE="fake_backend", OMP_NUM_THREADS="3")
    assert run.finish() == 0, run.err
    assert "threads 3\nready 0\n" in run.out
    assert run.out.endswith("dry run passed: one step as rank 0 of 4\n")
    # The stand-in takes the first dump folder, the trainer the last one.
    assert (tmp_path / "dry_run" / "logs").is_dir()
    assert not (tmp_path / "logs").exists()
    assert "a warning" in run.err


def test_ranks_that_end_one_by_one_may_be_interrupted(tmp_path):
    run = Launch(tmp_path, "stagger")
    run.wait_for_ranks()
    end = time.time() + 60
    while alive(run.rank_pids()[0]) and time.time() < end:
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0, run.err
    assert run.saved() == ["saved1"]


def test_how_to_resume_is_shown_whatever_is_shown(tmp_path):
    run = Launch(tmp_path, "wait", LOG_RANK="1")
    run.wait_for_ranks()
    time.sleep(0.2)
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 0
    assert "[rank1]:ready 1" in run.out and "ready 0" not in run.out
    told = "[rank0]:INFO - Stopped by SIGTERM after step 3 of 9: resume so"
    assert run.err.splitlines().count(told) == 1


@pytest.mark.parametrize("shown", ["0", "1"])
def test_the_refusal_of_rank_0_is_shown_once(tmp_path, shown):
    run = Launch(tmp_path, "refuse", LOG_RANK=shown)
    assert run.finish() != 0
    told = [line for line in run.err.splitlines() if "some.key" in line]
    assert told == ["[rank0]:error: some.key: got 1, expected 2"]


@pytest.mark.parametrize("variables", [{}, {"COMM_MODE": "fake_backend"}])
def test_logs_that_is_a_file(tmp_path, variables):
    folder = tmp_path / "dry_run" if variables else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "logs").write_text("")
    run = Launch(tmp_path, "end", **variables)
    assert run.finish() == 2
    assert run.err.startswith("error: job.dump_folder: got ") and len(run.err.splitlines()) == 1


def test_refusal_comes_before_any_rank(tmp_path):
    run = Launch(tmp_path, "end", CONFIG_FILE=str(tmp_path / "none.toml"))
    assert run.finish() == 2
    assert run.out == ""
    assert len(run.err.splitlines()) == 1
    assert run.err.startswith("error: job.config_file: got ")
    assert not list(tmp_path.glob("pid*"))
    assert not (tmp_path / "logs").exists()


@pytest.fixture
def variables(monkeypatch):
    for name in ("NGPU", "NNODES", "LOG_RANK", "COMM_MODE", "RDZV_ENDPOINT", "TRAIN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    return monkeypatch


REFUSED_VARIABLES = [
    ({"NGPU": "many"}, "NGPU: got 'many', expected a positive integer such as 4"),
    ({"NGPU": "0"}, "NGPU: got '0', expected a positive integer such as 4"),
    ({"NGPU": "-2"}, "NGPU: got '-2', expected a positive integer such as 4"),
    ({"NGPU": "1025"}, "NGPU: got '1025', expected at most 1,024"),
    ({"NGPU": "9" * 5000}, "NGPU: got '9999999999999999...', expected at most 1,024"),
    (
        {"NGPU": "1000001", "COMM_MODE": "fake_backend"},
        "NGPU: got '1000001', expected at most 1,000,000",
    ),
    ({"LOG_RANK": "9" * 5000}, "LOG_RANK: got "),
    ({"NNODES": "1.5"}, "NNODES: got '1.5', expected a positive integer such as 4"),
    ({"LOG_RANK": "4"}, "LOG_RANK: got '4', expected ranks from 0 to 3 such as 0,1"),
    ({"LOG_RANK": "0,x"}, "LOG_RANK: got '0,x', expected ranks from 0 to 3 such as 0,1"),
    ({"COMM_MODE": "local_tensor"}, "COMM_MODE: got 'local_tensor', expected 'fake_backend'"),
    ({"NNODES": "2"}, "RDZV_ENDPOINT: got '', expected host:port of one of the 2 machines"),
]


@pytest.mark.parametrize(("values", "expected"), REFUSED_VARIABLES)
def test_refused_variables(variables, capsys, values, expected):
    for name, value in values.items():
        variables.setenv(name, value)
    assert launch.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {expected}")
    assert len(captured.err.splitlines()) == 1


def test_refused_arguments(variables, capsys, tmp_path):
    variables.chdir(ROOT)
    arguments = [f"--job.dump_folder={tmp_path}/new", "--training.steps=ten"]
    assert launch.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == ("error: training.steps: got 'ten', expected an integer such as 10000\n")
    assert not (tmp_path / "new").exists()


def test_help(capsys):
    assert launch.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_environment(variables):
    default = launch.Environment(4, 1, "0", "", "torchtitan_lr.train", ranks_given=False)
    assert launch.read_environment() == default
    variables.setenv("NGPU", "")
    assert launch.read_environment() == default
    variables.setenv("NGPU", "8")
    variables.setenv("LOG_RANK", "0, 7")
    variables.setenv("NNODES", "2")
    variables.setenv("RDZV_ENDPOINT", "host:1234")
    environment = launch.read_environment()
    assert environment == launch.Environment(8, 2, "0,7", "", "torchtitan_lr.train")
    assert environment.world_size == 16


def test_arguments(variables):
    real = launch.Environment(4, 1, "0", "", "torchtitan_lr.train")
    dry = launch.Environment(4, 1, "0", "fake_backend", "torchtitan_lr.train")
    default = "--job.config_file=./train_configs/debug_cola.toml"
    assert launch.train_arguments(["--a.b=1"], real) == [default, "--a.b=1"]
    assert launch.train_arguments(["--job.config-file", "x"], real) == ["--job.config-file", "x"]
    variables.setenv("CONFIG_FILE", "y.toml")
    assert launch.train_arguments([], dry) == [
        "--job.config_file=y.toml",
        "--comm.mode=fake_backend",
        "--training.steps=1",
        "--checkpoint.no_enable",
    ]


def test_several_machines(variables, tmp_path):
    variables.setenv("RDZV_ENDPOINT", "host:1234")
    environment = launch.Environment(8, 2, "0", "", "torchtitan_lr.train")
    command, _ = launch.build_command(environment, ["--x.y=1"], tmp_path)
    assert "--nnodes=2" in command and "--rdzv_endpoint=host:1234" in command
    assert "--standalone" not in command
    assert command[-3:] == ["-m", "torchtitan_lr.train", "--x.y=1"]
    single = launch.Environment(8, 1, "0", "", "torchtitan_lr.train")
    assert "--standalone" in launch.build_command(single, [], tmp_path)[0]


def test_threads_are_shared_out(variables, tmp_path):
    variables.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for ranks, threads in ((1, cores), (cores, 1), (100 * cores, 1)):
        environment = launch.Environment(ranks, 1, "0", "", "m")
        _, child = launch.build_command(environment, [], tmp_path)
        assert child["OMP_NUM_THREADS"] == str(threads)
    variables.setenv("OMP_NUM_THREADS", "7")
    assert launch.build_command(environment, [], tmp_path)[1]["OMP_NUM_THREADS"] == "7"


def test_fewer_gpus_than_ranks(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    four = launch.Environment(4, 1, "0", "", "torchtitan_lr.train")
    with pytest.raises(ConfigError) as info:
        find_device(four)
    assert str(info.value) == (
        "NGPU: got 4, expected at most 1, the GPUs of this machine "
        "(or CUDA_VISIBLE_DEVICES= to train on the CPU)"
    )
    assert find_device(launch.Environment(1, 1, "0", "", "m")) == "cuda"
    # A dry run takes one GPU whatever NGPU says.
    assert find_device(launch.Environment(64, 1, "0", "fake_backend", "m")) == "cuda"


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (1, "cpu"), (4, "cuda"), (8, "cuda")])
def test_default_number_of_ranks(variables, monkeypatch, capsys, tmp_path, gpus, device):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    variables.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment, found = launch.place_ranks(launch.read_environment())
    assert (environment.ranks, found) == (4, device)
    _, child = launch.build_command(environment, [], tmp_path)
    assert child["CUDA_VISIBLE_DEVICES"] == ("" if gpus == 1 else "0,1")
    told = capsys.readouterr().out
    assert told.count("\n") == (device == "cpu")
    if device == "cpu":
        assert "training on 4 CPU processes" in told
    if gpus == 1:
        assert "NGPU=1" in told
        # What was asked for is not changed.
        variables.setenv("NGPU", "4")
        with pytest.raises(ConfigError):
            launch.place_ranks(launch.read_environment())


def test_empty_dump_folder_of_a_dry_run(variables, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(launch, "run", lambda env, args, logs, config: seen.append(logs) or 0)
    config = str(ROOT / "train_configs" / "debug_cola.toml")
    monkeypatch.chdir(tmp_path)
    variables.setenv("COMM_MODE", "fake_backend")
    variables.setenv("CONFIG_FILE", config)
    assert launch.main(["--job.dump_folder="]) == 0
    assert len(seen) == 1 and (tmp_path / seen[0]).parent == tmp_path / "dry_run" / "logs"


def test_summary_of_another_run_is_not_shown(tmp_path):
    path = tmp_path / "summary.json"
    assert read_summary(tmp_path, newer_than=0.0) is None
    path.write_text('{"steps": 1}')
    assert read_summary(tmp_path, newer_than=path.stat().st_mtime - 1) == {"steps": 1}
    assert read_summary(tmp_path, newer_than=path.stat().st_mtime + 1) is None


def test_summary_lines(tmp_path):
    summary = {
        "steps": 300,
        "train_loss": 3.25,
        "val_loss": 3.5,
        "val_ppl": math.exp(3.5),
        "unigram_entropy": 6.125,
        "tokens_per_s": 12345.6,
        "mfu": 41.5,
        "peak_memory_gib": 1.5,
        "checkpoint": "out/checkpoint/step-300",
        "curve": "out/curve.png",
    }
    lines = summary_lines(summary, tmp_path, tmp_path / "logs")
    assert len(lines) <= 12
    text = "\n".join(lines)
    for part in ("300", "3.2500", "3.5000", "33.12", "6.1250", "12,346", "41.50 %", "1.50 GiB"):
        assert part in text
    assert "step-300" in text and "curve.png" in text and str(tmp_path / "logs") in text


def test_first_failure_is_the_one_told(tmp_path):
    for rank, when in ((0, 20), (1, 10)):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        message = {"message": f"Error: of {rank}\nmore", "extraInfo": {"timestamp": str(when)}}
        (folder / "error.json").write_text(json.dumps({"message": message}))
    half = tmp_path / "run" / "attempt_0" / "2"
    half.mkdir()
    (half / "error.json").write_text('{"mess')
    told = describe_failure(tmp_path, 1)
    assert told == f"rank 1 failed: Error: of 1; its output: {tmp_path}/run/attempt_0/1"
    assert describe_failure(tmp_path / "none", 3).startswith("the ranks ended with status 3")


def test_child_pids():
    with subprocess.Popen(["sleep", "30"]) as child:
        try:
            assert child.pid in child_pids(os.getpid())
            assert child.pid not in child_pids(os.getppid())
        finally:
            child.kill()


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_environment_check_reads_pyproject():
    check_env = load_script("check_env")
    text = (ROOT / "pyproject.toml").read_text()
    plain = check_env.requirements(text, [])
    assert "torch>=2.11,<2.14" in plain and "torchtitan==0.2.2" in plain
    assert not any(requirement.startswith("pytest") for requirement in plain)
    assert set(check_env.requirements(text, ["dev"])) - set(plain) >= {"pytest", "ruff", "mypy"}
    assert all(map(check_env.satisfied, plain))


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("pytest", True),
        ("pytest>=1,<1000", True),
        ("pytest<1", False),
        ("pytest==1.2.3", False),
        ("no-such-distribution", False),
        ("no-such-distribution; sys_platform == 'linux'", sys.platform != "linux"),
    ],
)
def test_environment_check(requirement, expected):
    assert load_script("check_env").satisfied(requirement) is expected


def test_release_numbers():
    release = load_script("check_env").release
    assert release("2.13.0+cpu") == (2, 13)
    assert release("2.14.0rc1") == (2, 14)
    assert release("2.9") < release("2.11")


def test_smoke_judge(tmp_path):
    problems = load_script("check_smoke").problems
    (tmp_path / "x").write_text("")
    good = {"steps": 20, "train_loss": 7.0, "val_loss": 7.1}
    good |= {"checkpoint": str(tmp_path), "curve": str(tmp_path / "x")}
    assert problems(good) == []
    for key, value in (
        ("steps", 19),
        ("train_loss", float("nan")),
        ("train_loss", math.log(4096)),
        ("val_loss", None),
        ("val_loss", 9.0),
        ("checkpoint", None),
        ("curve", "/no/such"),
    ):
        assert len(problems(good | {key: value})) == 1, key


REPORT = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 13188)  (SIGTERM)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 5 (local_rank: 1)
  exitcode  : {code}
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("-9 (pid: 13189)  (SIGKILL)", (1, "SIGKILL")),
        ("-11 (pid: 13189)  (SIGSEGV)", (1, "SIGSEGV")),
        ("1 (pid: 13189)", None),
        ("-15 (pid: 13189)  (SIGTERM)", None),
    ],
)
def test_a_rank_that_a_signal_ended_is_found(code, found, tmp_path):
    assert killed_rank(tmp_path) is None
    (tmp_path / "launcher.log").write_text(REPORT.format(code=code))
    assert killed_rank(tmp_path) == found


def test_a_killed_rank_is_the_cause_not_those_that_missed_it(tmp_path):
    (tmp_path / "launcher.log").write_text(REPORT.format(code="-9 (pid: 1)  (SIGKILL)"))
    folder = tmp_path / "run/attempt_0/1"
    folder.mkdir(parents=True)
    other = tmp_path / "run/attempt_0/0"
    other.mkdir()
    message = {"message": "RuntimeError: Connection closed", "extraInfo": {"timestamp": "1"}}
    (other / "error.json").write_text(json.dumps({"message": message}))
    told = describe_failure(tmp_path, 1)
    assert told.startswith("rank 1 was ended by SIGKILL (which is also")
    assert told.endswith(f"its output: {folder}")


def test_a_rank_that_fell_after_telling_its_error_is_no_killed_one(tmp_path):
    (tmp_path / "launcher.log").write_text(REPORT.format(code="-6 (pid: 1)  (SIGABRT)"))
    assert killed_rank(tmp_path) == (1, "SIGABRT")
    folder = tmp_path / "run/attempt_0/1"
    folder.mkdir(parents=True)
    message = {"message": "NonFiniteError: step 2", "extraInfo": {"timestamp": "1"}}
    (folder / "error.json").write_text(json.dumps({"message": message}))
    assert killed_rank(tmp_path) is None
    assert describe_failure(tmp_path, 1).startswith("rank 1 failed: NonFiniteError: step 2;")


def test_how_to_go_on(tmp_path):
    checkpoint = SimpleNamespace(folder="checkpoint", enable=True)
    config = SimpleNamespace(checkpoint=checkpoint, job=SimpleNamespace(dump_folder=str(tmp_path)))
    assert launch.how_to_go_on(config) == "; there is no checkpoint to resume from"
    for step, complete in ((2, True), (4, True), (6, False)):
        folder = tmp_path / f"checkpoint/step-{step}"
        folder.mkdir(parents=True)
        if complete:
            (folder / ".metadata").write_text("")
    assert launch.how_to_go_on(config).endswith(f"resume from {tmp_path}/checkpoint/step-4")
    checkpoint.enable = False
    assert launch.how_to_go_on(config) == "; there is no checkpoint to resume from"
