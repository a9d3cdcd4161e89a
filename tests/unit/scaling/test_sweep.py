# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/sweep.py`` without its runs; tests/integration kills and resumes real ones."""

import csv
import json
from pathlib import Path

import pytest

from tests.commands import Command
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling import sweep as grids
from torchtitan_lr.scaling.experiments import RunFailedError, Stopped, check_run

script = Command("sweep")

CONFIG = "train_configs/debug_cola.toml"
GRID = ["--set", "low_rank.rank=16,32", "--set", "parallelism.tp_plan=vanilla,btp"]


def test_grid():
    grid = script.parse_grid(["low_rank.rank=16,32", "optimizer.lr=1e-3"])
    points = script.points_of(grid, ["--training.steps=3"], "ranks")
    assert [p.name for p in points] == ["rank-16_lr-1e-3", "rank-32_lr-1e-3"]
    assert points[1].settings == {"low_rank.rank": "32", "optimizer.lr": "1e-3"}
    assert points[1].arguments == [
        *("--training.steps=3", "--low_rank.rank=32", "--optimizer.lr=1e-3"),
        *("--metrics.wandb_group=ranks", "--metrics.wandb_run_name=rank-32_lr-1e-3"),
    ]
    both = script.parse_grid(["training.seq_len=64", "validation.seq_len=32,64"])
    (first, _) = script.points_of(both, [], "g")
    assert first.name == "training.seq_len-64_validation.seq_len-32"


@pytest.mark.parametrize(
    "items", [["rank=3"], ["low_rank.rank"], ["low_rank.rank="], ["a.b=1,1"], ["a.b=1", "a.b=2"]]
)
def test_what_is_no_grid(items):
    with pytest.raises(ConfigError, match="--set"):
        script.parse_grid(items)


@pytest.mark.parametrize(
    ("item", "instead"),
    [
        ("--set=job.dump_folder=a,b", "each point has a folder of its own"),
        ("--job.dump-folder=a", "each point has a folder of its own"),
        ("--job.config_file=a", "the TOML file is the first argument"),
        ("--set=metrics.wandb_run_name=a,b", "each point has a name of its own"),
        ("--metrics.wandb_group=a", "use --group"),
    ],
)
def test_what_the_sweep_sets_itself_is_refused(tmp_path, capsys, item, instead):
    assert script.main([CONFIG, *GRID, f"--work={tmp_path}", item]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and instead in line


@pytest.mark.parametrize("blocked", ["work", "work/below", "work/.lock"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, capsys, blocked):
    path = tmp_path / "work"
    if blocked == "work/.lock":
        (path / ".lock").mkdir(parents=True)
    else:
        path.write_text("")
    work = path / "below" if blocked == "work/below" else path
    assert script.main([CONFIG, *GRID, f"--work={work}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --work: got '{work}', expected a folder to write to (")


def test_names_that_fall_together_are_refused():
    with pytest.raises(ConfigError, match="names differ"):
        script.points_of({"a.path": ["x/y", "x:y"]}, [], "g")


class Launcher:
    """Stands for the launcher: writes a summary, or fails or stops at the points it is told to."""

    def __init__(self, **ends):
        self.ends, self.seen = ends, []

    def __call__(self, config, folder, arguments, keep_open):
        assert len(keep_open) == 1
        self.seen.append(folder.name)
        end = self.ends.get(folder.name.partition("_")[0].replace("-", "_"))
        if end is not None:
            raise end
        keys = ("val_loss", "val_ppl", "train_loss", "tokens_per_s", "mfu", "peak_memory_gib")
        summary = dict.fromkeys(keys, 1.5) | {"steps": 3, "mfu": None}
        (folder / "summary.json").write_text(json.dumps(summary))


def sweep(monkeypatch, tmp_path, launcher, *more):
    monkeypatch.setenv("NGPU", "4")
    monkeypatch.setattr(grids, "launch", launcher)
    monkeypatch.setattr(script, "on_signals_stop", lambda: None)
    return script.main([CONFIG, *GRID, "--work", str(tmp_path / "ranks"), *more])


def test_a_sweep_and_what_is_left_to_do(monkeypatch, tmp_path, capsys):
    work = tmp_path / "ranks"
    launcher = Launcher(rank_32=RunFailedError("error: rank 1 failed"))
    assert sweep(monkeypatch, tmp_path, launcher) == 1
    assert len(launcher.seen) == 4
    rows = json.loads((work / "sweep.json").read_text())
    assert [row["status"] for row in rows] == ["finished"] * 2 + [
        "failed: error: rank 1 failed"
    ] * 2
    assert rows[0]["parameters"] < rows[2]["parameters"]
    table = (work / "sweep.md").read_text()
    assert table.startswith("| status | low_rank.rank | parallelism.tp_plan | parameters |")
    assert table.strip() in capsys.readouterr().out
    with (work / "sweep.csv").open() as file:
        assert [r["val_loss"] for r in csv.DictReader(file)] == ["1.5", "1.5", "", ""]

    # A stop leaves the point to do; the next start runs only what is not finished.
    launcher = Launcher(rank_32=Stopped("SIGTERM"))
    assert sweep(monkeypatch, tmp_path, launcher) == 130
    assert launcher.seen == ["rank-32_tp_plan-vanilla"]
    launcher = Launcher()
    assert sweep(monkeypatch, tmp_path, launcher) == 0
    assert launcher.seen == ["rank-32_tp_plan-vanilla", "rank-32_tp_plan-btp"]
    launcher = Launcher()
    assert sweep(monkeypatch, tmp_path, launcher) == 0 and launcher.seen == []


def test_a_folder_of_another_sweep_is_refused(monkeypatch, tmp_path, capsys):
    assert sweep(monkeypatch, tmp_path, Launcher()) == 0
    capsys.readouterr()
    assert sweep(monkeypatch, tmp_path, Launcher(), "--training.seq_len=64") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --work: got") and err.count("\n") == 1


def test_refused_points(monkeypatch, tmp_path, capsys):
    grid = ["--set", "parallelism.tp_plan=btp,megatron", "--work", str(tmp_path / "w")]
    monkeypatch.setenv("NGPU", "4")
    launcher = Launcher()
    monkeypatch.setattr(grids, "launch", launcher)
    monkeypatch.setattr(script, "on_signals_stop", lambda: None)
    assert script.main([CONFIG, *grid]) == 2
    assert "parallelism.tp_plan: got 'megatron'" in capsys.readouterr().err
    assert launcher.seen == []
    assert script.main([CONFIG, *grid, "--skip_refused", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1]["status"].startswith("refused: parallelism.tp_plan")
    assert launcher.seen == ["tp_plan-btp"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "CONFIG"),
        ([CONFIG], "--set"),
        (["no.toml", *GRID], "CONFIG: got 'no.toml', expected a TOML file"),
        ([CONFIG, *GRID, "--beams=4"], "got '--beams=4'"),
        ([CONFIG, "--set", "rank=3"], "--set: got 'rank=3', expected section.key=value,value"),
        ([CONFIG, "--set", "low_rank.rnk=3"], "low_rank.rnk"),
        ([CONFIG, "--set", "low_rank.rank=a,b"], "low_rank.rank: got 'a'"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, arguments, told):
    monkeypatch.setenv("NGPU", "4")
    monkeypatch.chdir(tmp_path)
    if CONFIG in arguments:
        monkeypatch.chdir(script.Path(script.__file__).resolve().parents[1])
    arguments = [*arguments, f"--work={tmp_path / 'w'}"]
    try:
        status = script.main(arguments)
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and told in err and err.count("\n") == 1


def test_a_checkpoint_in_the_tomls_own_folder_is_no_points(monkeypatch, tmp_path):
    step = tmp_path / "run/checkpoint/step-1"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    (step / "manifest.json").write_text(json.dumps({"model": {"model.name": "llama_full"}}))
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    with pytest.raises(ConfigError, match="llama_full"):  # the control: it refuses a run there
        check_run([f"--job.config_file={CONFIG}", folder])
    config = tmp_path / "job.toml"
    text = Path(CONFIG).read_text().replace("./outputs/debug_cola", str(tmp_path / "run"))
    config.write_text(text)
    assert str(tmp_path / "run") in config.read_text()
    monkeypatch.setitem(globals(), "CONFIG", str(config))
    assert sweep(monkeypatch, tmp_path, Launcher()) == 0
