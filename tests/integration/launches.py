# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher, with a small real program in place of the training (TRAIN_FILE)."""

import time

from tests.integration import runs
from tests.integration.runs import ROOT

STANDIN = """
import os, signal, sys
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.processes import begin_rank
from torchtitan_lr.launch.run_folder import STOPPED, write_state

begin_rank()

mode, rank = os.environ["STANDIN"], os.environ.get("RANK", "0")
folder = Path(next(a for a in sys.argv if a.startswith("--job.dump_folder=")).partition("=")[2])
read, write = os.pipe()


def leave(name, text=""):
    # Under its name at once with all that it holds.
    (folder / f"new-{name}").write_text(text)
    os.replace(folder / f"new-{name}", folder / name)


def wait_for_signal():
    os.read(read, 1)


if mode != "deaf":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: os.write(write, b"1"))
leave(f"pid{rank}", str(os.getpid()))
print("ready", rank, flush=True)
print("a warning", file=sys.stderr, flush=True)
@record
def fail(error):
    raise error


if mode == "refuse" and rank == "1":
    try:
        fail(ConfigError("some.key", 1, "2"))
    except ConfigError:
        sys.exit(2)
if mode == "refuse":
    wait_for_signal()  # torchrun's
    sys.exit(2)
if mode in ("wait", "deaf", "stubborn"):
    wait_for_signal()
if mode == "stubborn":
    leave(f"asked{rank}")
    wait_for_signal()
if mode == "fail" and rank == "1":
    if "GPUS" in os.environ:
        Path(os.environ["GPUS"]).write_text("1")
    fail(ValueError("no such luck\\nsecond line"))
if mode == "full" and rank == "1":
    try:
        with (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        print("words that the disk has no place for\\n" * 1000, file=sys.stderr, flush=True)
    sys.exit(1)
if mode == "wait" and rank == "0":
    write_state(folder, STOPPED, "SIGTERM after step 3")
    print("INFO - Stopped by SIGTERM after step 3 of 9: resume so", file=sys.stderr, flush=True)
leave(f"saved{rank}")
"""


class Launch(runs.Process):
    def __init__(self, folder, mode, *arguments, **variables):
        (folder / "standin.py").write_text(STANDIN)
        self.folder = folder
        standard = {
            "PYTHONPATH": f"{ROOT}:{folder}",
            "TRAIN_FILE": "standin",
            "STANDIN": mode,
            "NGPU": "2",
            "CONFIG_FILE": str(ROOT / "train_configs" / "debug_cola.toml"),
        }
        launch = runs.FEW_GPUS if "GPUS" in variables else runs.LAUNCH
        command = [*launch, f"--job.dump_folder={folder}", *arguments]
        super().__init__(command, **standard | variables)

    def wait_for(self, what):
        """Waits for the file of every rank."""
        paths = [self.folder / f"{what}{rank}" for rank in range(2)]
        self.wait_until(lambda: all(path.exists() for path in paths))
        return paths

    def wait_for_ranks(self):
        pids = [int(path.read_text()) for path in self.wait_for("pid")]
        time.sleep(1)  # until the launcher too knows that all have started
        return pids

    def saved(self):
        return sorted(path.name for path in self.folder.glob("saved*"))
