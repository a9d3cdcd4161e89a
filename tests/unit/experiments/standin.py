# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""In place of the training: rate 2e-3 is best, above 1e-2 diverges; rank 32 fails, 64 waits."""

import json
import os
import signal
import sys
import time
from math import log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # the interpreter has no site packages
from torchtitan_lr.launch.run_folder import DIVERGED, EXIT_STATUS, FAILED, write_state

given = dict(argument.removeprefix("--").partition("=")[::2] for argument in sys.argv[1:])
folder, rate = Path(given["job.dump_folder"]), float(given.get("optimizer.lr", 2e-3))
begin = time.time()
if rate > 1e-2:
    print("error: step 2: its own words", file=sys.stderr)
    sys.exit(EXIT_STATUS[DIVERGED])
if given.get("low_rank.rank") == "32":
    write_state(folder, FAILED, "ValueError: no luck", 1, 3, begin)
    sys.exit("error: rank 1 failed\nmore")
if given.get("low_rank.rank") == "64":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (folder / "ready").touch()
    time.sleep(60)
time.sleep(0.2)
loss = 5 + abs(log(rate / 2e-3)) + 0.01 * int(given.get("debug.seed", 0))
summary = dict.fromkeys(("val_ppl", "tokens_per_s", "mfu", "peak_memory_gib"), 1.5)
summary |= {"val_loss": loss, "train_loss": loss, "steps": int(given["training.steps"])}
summary |= {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "time": [begin, time.time()]}
(folder / "summary.json").write_text(json.dumps(summary))
