# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run warns of: a loss that jumps, a speed that falls, a rank that the others wait for."""

import math
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lr.agreement import from_all_ranks
from torchtitan_lr.training import history

_WINDOW = 20  # logged steps with which a step is compared; before them nothing is told
_JUMP = 1.05  # times the largest loss of the window
_FALL = 0.8  # of the window's median tokens per second
_LAG = 20.0  # percent of the slowest rank's time above the median rank's
_LASTING = 8  # logged steps in a row with low speed, or with the same slowest rank


class Watch:
    """Looks at logged steps, and tells once of what has begun to be wrong.

    Ranks are compared by the time of a block's forward, where data-parallel ranks wait for nobody.
    Those that share sums within a block are one, named by its first.
    """

    def __init__(self, parts: Sequence[nn.Module], on_gpu: bool, sharing: int) -> None:
        self._sharing, self._on_gpu = sharing, on_gpu
        self.compares = dist.get_backend() != "fake" and dist.get_world_size() > sharing
        self.measures = False  # the step at hand; of a replayed graph there is nothing to measure
        self._marks: list[Any] = []  # beginnings and ends in turn
        self._losses, self._speeds = deque[float](maxlen=_WINDOW), deque[float](maxlen=_WINDOW)
        self._slowest = ""  # rank and machine
        self._wrong: Counter[str] = Counter()  # logged steps in a row, by title
        blocks = [block for part in parts for block in part.get_submodule("layers").children()]
        for block in blocks if self.compares else ():
            block.register_forward_pre_hook(self._mark)
            block.register_forward_hook(self._mark)

    def _mark(self, *_: Any) -> None:
        if self.measures and torch.is_grad_enabled():
            mark: Any = time.perf_counter()
            if self._on_gpu:  # behind the gathered weights, for which FSDP2's stream waits
                mark = torch.cuda.Event(enable_timing=True)
                mark.record()
            self._marks.append(mark)

    def metrics(self) -> dict[str, float]:
        """Return which rank was the slowest, and by how much; call it on every rank."""
        if not self.measures:
            return {}
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        each = [a.elapsed_time(b) if self._on_gpu else b - a for a, b in pairs]
        self._marks.clear()
        own = median(each) if each else 0.0  # a stage of a pipeline may have no block
        found = from_all_ranks((own, socket.gethostname()))
        # Within a block one may wait for a neighbour that waits for another group.
        times = [min(found[i : i + self._sharing])[0] for i in range(0, len(found), self._sharing)]
        rank = self._sharing * times.index(max(times))
        before, self._slowest = self._slowest, f"rank {rank} on {found[rank][1]}"
        self._wrong["Slow rank"] *= self._slowest == before
        behind = 100 * (max(times) / median_low(filter(None, times)) - 1)
        return {history.SLOWEST_RANK: rank, history.SLOWEST_BEHIND: behind}

    def look(self, metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield title and line of what has begun to be wrong."""
        loss, speed = history.train_loss(metrics) or math.nan, metrics[history.TOKENS_PER_S]
        behind, is_full = metrics.get(history.SLOWEST_BEHIND, 0.0), len(self._speeds) == _WINDOW
        usual = median(self._speeds) if is_full else 0.0
        losses = self._losses if is_full else ()
        most = max(losses, default=math.inf)
        # Losses near 0 are noisy: one that jumps is above the largest by their spread, too.
        limit = max(_JUMP * most, 2 * most - median(losses)) if losses else math.inf
        mfu = f", MFU {metrics[history.MFU]:.2f}%" if history.MFU in metrics else ""
        slow = f"{speed:,.0f} tokens/s{mfu}, before {usual:,.0f} tokens/s"
        for title, is_wrong, lasting, line in (
            ("Loss spike", loss > limit, 1, f"loss {loss:.3f}, before at most {most:.3f}"),
            ("Slow steps", speed < _FALL * usual, _LASTING, slow),
            ("Slow rank", behind > _LAG, _LASTING, f"{self._slowest} takes {behind:.0f}% longer"),
        ):
            self._wrong[title] = self._wrong[title] + 1 if is_wrong else 0
            if self._wrong[title] == lasting:
                yield title, line
        self._speeds.append(speed)
        if math.isfinite(loss):  # a skipped step has none
            self._losses.append(loss)
