#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Time whole training steps of our models and of others' models of the same shape.

A step is forward, backward and fused AdamW on random tokens. The models take turns in one process,
eager and compiled block by block:

    full          our llama_full
    titan         torchtitan's llama3
    transformers  transformers' LlamaForCausalLM
    cola          our llama_cola
    published     transformers' model with CoLA's published formula in its linears
    svd, lax      our llama_svd and llama_lax

    python scripts/check/bench_peers.py --flavor 60M --batch 8 --seq_len 256 --out peers.png

Ratios are medians over the turns, with their quartiles. CPU time depends less on other load than
time by the clock. "saved" is what the model's forward pass keeps for backward, weights and the loss
aside. The script needs no network; the peers need transformers.
"""

import json
import os
import platform
import sys
from pathlib import Path

import torch

from scripts.bench.peers import MODES, PEERS, Workload, as_text, draw, measure
from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.training.device import keep_freed_memory


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure, print a table or JSON, and draw the picture if there is a path for it."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--flavor", choices=sorted(FLAVORS["cola"]), default="60M")
    parser.add_argument("--layers", type=int, default=0, help="blocks; 0 is the flavor's number")
    parser.add_argument("--vocab_size", type=int, default=0, help="vocabulary; 0 is the flavor's")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--seq_len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of every model")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of every model")
    parser.add_argument("--models", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print a dictionary instead")
    parser.add_argument("--out", type=Path, help="picture of the ratios (PNG)")
    options = parser.parse_args(argv)
    minima = {
        "layers": 0,
        "vocab_size": 0,
        "batch": 1,
        "seq_len": 1,
        "threads": 1,
        "steps": 1,
        "warmup": 1,
    }
    parser.check_at_least(options, **minima)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got 'cuda', expected 'cpu', the only device here")
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        keep_freed_memory()  # as training does
    dtype, device = getattr(torch, options.dtype), options.device
    workload = Workload(
        options.flavor,
        options.batch,
        options.seq_len,
        options.layers,
        options.vocab_size,
        dtype,
        device,
    )
    modes = measure(workload, options.models, options.modes, options.steps, options.warmup)
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    head: dict[str, object] = {"machine": machine or platform.machine(), "torch": torch.__version__}
    head |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if options.json:
        asked = {key: str(value) for key, value in vars(options).items()}
        print(json.dumps({**head, "options": asked, "modes": modes}, indent=1))
    else:
        print(", ".join(f"{key} {value}" for key, value in head.items()), as_text(modes), sep="\n")
    if options.out is not None:
        draw(modes, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
