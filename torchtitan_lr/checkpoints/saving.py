# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Save a step with its record, and compare the files with it before they are loaded.

Every rank computes the checksums of its own files from the bytes it writes, and sends them to the
first rank with DCP's results. The first rank writes ``step.json`` after all other files. Before a
load the ranks read all files and compare the checksums, each rank its share: what the rank of its
number wrote, so that storage is read once. Files in Hugging Face's format are written by another
library, so their checksums are computed after the save.
"""

import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint import SavePlanner as Planner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_lr.agreement import first_rank_with, from_all_ranks, from_first_rank
from torchtitan_lr.checkpoints.folders import BEGUN, METADATA, STEP_FILE
from torchtitan_lr.checkpoints.record import DamagedError, Record, Sum, describe, read_step
from torchtitan_lr.compat.dispatch import tree_map_only
from torchtitan_lr.compat.dtensor import local_part, with_local_part
from torchtitan_lr.config.files import file_within, open_regular

T = TypeVar("T")

_CHUNK = 1 << 22  # bytes read at a time
_SMALL = 4096  # bytes of a tensor
_PART = re.compile(r"__(\d+)_\d+\.distcp")  # what a rank wrote, with its number


class StepWriter(FileSystemWriter):
    """DCP's file writer, which also writes the step's record: ``record`` with what a save adds.

    ``weights`` are names of tensors; each rank checks that its part of them is finite.
    """

    def __init__(self, step_dir: str | Path, record: Record, weights: Iterable[str] = ()) -> None:
        super().__init__(step_dir)
        self.fs: _SummingFileSystem = _SummingFileSystem()
        self.fs.sums = {}
        self._record, self._weights = record, frozenset(weights)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy on the host for a background save."""

        # torch's own fails where a rank's part of a tensor is empty.
        def copied(tensor: Tensor) -> Tensor:
            return with_local_part(tensor, local_part(tensor).detach().to("cpu", copy=True))

        staged: dict[str, Any] = tree_map_only(Tensor, copied, state_dict)
        return staged

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the folder to `write_data`: the first rank may still rename an old one."""
        return plan

    def write_data(self, plan: SavePlan, planner: Planner) -> Future[list[WriteResult]]:
        """Write this rank's files; the result includes their sizes and checksums."""
        self.fs.mkdir(self.path)
        # Checked here, where a background save works on its copy.
        weights = (
            planner.resolve_data(item) for item in plan.items if item.index.fqn in self._weights
        )
        finite = all_finite(tensor for tensor in weights if isinstance(tensor, Tensor))
        results = _Results(super().write_data(plan, planner).wait())
        results.sums, results.finite = self.fs.sums.copy(), finite
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish the save on the first rank: write ``.metadata``, then the record."""
        begun = Path(self.path, BEGUN)
        begun.touch()
        super().finish(metadata, results)
        files = {METADATA: self.fs.sums[f"{METADATA}.tmp"]}
        finite = True
        for result in cast(list[_Results], results):
            files |= result.sums
            finite &= result.finite
        replace(self._record, files=files, finite=finite).write(Path(self.path))
        begun.unlink()


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, with the counters and settings that all ranks load in the first one's file.

    DCP spreads what several ranks hold over the files of all of them. Each rank would open as many
    files as there are such values, hundreds in a large model, when a run resumes.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Leave small values to the first rank that has them."""
        plans: list[SavePlan] = []
        placed: set[MetadataIndex] = set()
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in placed]
            placed |= {x.index for x in items if (x.tensor_storage_size() or 0) <= _SMALL}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every tensor has a finite norm in fp32."""
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
    return not norms or bool(torch.stack(norms).isfinite().all().item())


def write_record(step_dir: str | Path, record: Record) -> None:
    """Write the record of a step's existing files; call it on every rank, each reads its share."""
    folder = Path(step_dir)
    names = from_first_rank([path.name for path in folder.iterdir() if path.is_file()])
    sums = {name: _sum_of(folder / name) for name in _share(names) if name != STEP_FILE}
    files: dict[str, Sum] = {}
    for share in from_all_ranks(sums):
        files |= share
    if _rank() == 0:
        replace(record, files=files).write(folder)


def verified(step_dir: str | Path) -> Record:
    """Return a step's record if its files are what was saved, else raise a DamagedError.

    Call it on every rank: each reads its share, and all raise the same.
    """
    record = read_once(read_step, step_dir)
    damage = None
    for name in _share(record.files):
        damage = damage or _damage_of(Path(step_dir), name, record.files[name])
    if found := first_rank_with(damage):
        raise DamagedError(found[1])
    return record


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _share(names: Iterable[str]) -> list[str]:
    """Return the files that this rank reads; with as many ranks as at the save its own one."""

    def place(name: str) -> tuple[int, str]:
        found = _PART.fullmatch(name)
        return (int(found[1]) if found else sys.maxsize), name

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return sorted(names, key=place)[_rank() :: ranks]


def _damage_of(folder: Path, name: str, saved: Sum) -> str | None:
    try:
        path = file_within(folder, name)
        found = path.stat().st_size
        if found != saved[0]:
            return f"{name} has {found} bytes instead of {saved[0]}"
        if _sum_of(path) != saved:
            return f"{name} has another checksum than when it was saved"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({describe(error)})"
    return None


def read_once(read: Callable[[str | Path], T], step_dir: str | Path) -> T:
    """Return what the first rank reads, or raise its DamagedError, on every rank.

    A thousand ranks would read the same file at the same moment.
    """
    found: T | DamagedError | None = None
    if _rank() == 0:
        try:
            found = read(step_dir)
        except DamagedError as error:
            found = error
    found = from_first_rank(found)
    if isinstance(found, DamagedError):
        raise found
    return cast(T, found)


def _sum_of(path: Path) -> Sum:
    size, checksum, buffer = 0, 0, bytearray(_CHUNK)
    with open_regular(path, sys.maxsize) as file:
        while count := file.readinto(buffer):
            size, checksum = size + count, zlib.crc32(memoryview(buffer)[:count], checksum)
    return [size, checksum]


class _Results(list[WriteResult]):
    """DCP's results that a rank sends to the first one, with what the record needs."""

    sums: dict[str, Sum]
    finite: bool


class _SummedFile(io.BufferedWriter):
    """A file that computes size and checksum of the written data; it must not be seeked."""

    size = checksum = 0
    failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.size += memoryview(data).nbytes
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class _SummingFileSystem(FileSystem):
    """Computes checksums of written files."""

    sums: dict[str, Sum]

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with _SummedFile(io.FileIO(path, mode)) as stream:
            try:
                yield stream
            except RuntimeError as error:
                if stream.failure is None:
                    raise
                # torch's writer of archives hides a full disk behind an error of its own.
                raise stream.failure from error
            self.sums[Path(path).name] = [stream.size, stream.checksum]
