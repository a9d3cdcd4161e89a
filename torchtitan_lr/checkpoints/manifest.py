# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A checkpoint's manifest: size and checksum of every file, the model, and finite weights.

Every rank computes the checksums of its own files from the bytes it writes, and sends them to the
first rank with DCP's results. The first rank writes ``manifest.json`` after ``.metadata.tmp`` and
before the renaming to ``.metadata`` that ends a save, so every complete checkpoint has its
manifest, even after a kill. Before a load the ranks read all files and compare the checksums, each
rank its share: the files that its machine is likely to load, so that the load finds them in memory
and storage is read once per machine. Files in Hugging Face's format are written by another library,
so their checksums are computed after the save.

A manifest has a checksum of its own. If it is missing, damaged or does not name all files, nothing
says what was saved: the checkpoint is refused, unless ``checkpoint.allow_unverified`` is set.
"""

import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_lr.agreement import first_rank_where, from_all_ranks, from_first_rank
from torchtitan_lr.checkpoints.folders import (
    HF_INDEX,
    MANIFEST,
    METADATA,
    complete_steps,
    is_dcp,
    is_finite,
    step_folder,
    write_whole,
)
from torchtitan_lr.checkpoints.safe_metadata import DamagedError, describe, read_metadata
from torchtitan_lr.config.files import file_within, open_regular, read_json, sealed, unsealed

T = TypeVar("T")

_CHUNK = 1 << 22  # bytes read at a time
_SMALL = 4096  # bytes of a tensor
_PART = re.compile(r"__(\d+)_\d+\.distcp")  # what a rank wrote, with its number

Sum = list[int]
"""Size in bytes and CRC-32 of a file; a list, since JSON has no tuples."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``.

    Attributes:
        files: Size and checksum by name, of all files except the manifest.
        model: The model's fingerprint (`torchtitan_lr.training.fingerprint`); empty if unknown.
        finite: Whether the weights and the sums of their squares were finite.
    """

    files: dict[str, Sum] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    finite: bool = True

    def as_json(self) -> str:
        """Return the file's text, with a checksum of its content."""
        return json.dumps(sealed(asdict(self)), indent=1)


class UnverifiedError(DamagedError):
    """No manifest says what was saved; the message has the key that loads the files as they are."""

    def __init__(self, why: str) -> None:
        advice = "checkpoint.allow_unverified = true loads the files without a check"
        super().__init__(f"{why}: nothing says what was saved; {advice}")


def read_manifest(step_dir: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        UnverifiedError: The manifest is missing, cannot be read or is not what was written.
    """
    try:
        manifest = Manifest(**unsealed(read_json(Path(step_dir) / MANIFEST)))
        for size, checksum in manifest.files.values():
            if type(size) is not int or type(checksum) is not int:
                raise TypeError("a size or a checksum is no integer")
        manifest.model.items()
    except FileNotFoundError as error:
        raise UnverifiedError(f"{MANIFEST} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UnverifiedError(f"{MANIFEST} cannot be read ({describe(error)})") from error
    return manifest


class ManifestWriter(FileSystemWriter):
    """DCP's file writer, which also writes the manifest.

    Args:
        step_dir: The checkpoint's folder.
        model: The model's fingerprint.
        weights: Names of tensors; each rank checks that its part of them is finite.
    """

    def __init__(
        self, step_dir: str | Path, model: dict[str, Any], weights: Iterable[str] = ()
    ) -> None:
        super().__init__(step_dir)
        self.fs: _SummingFileSystem = _SummingFileSystem()
        self.fs.sums = {}
        self._model, self._weights = model, frozenset(weights)

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; the result includes their sizes and checksums."""
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
        """Finish the save on the first rank: write the manifest, then ``.metadata``."""
        files: dict[str, Sum] = {}
        finite = True
        for result in cast(list[_Results], results):
            files |= result.sums
            finite &= result.finite
        self.fs.manifest = Manifest(files, self._model, finite)
        super().finish(metadata, results)


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
    """Return whether every tensor has a finite norm in fp32.

    The tensors are this rank's parts, on one device.
    """
    # Weights whose squares overflow count as non-finite: every norm over them is infinite.
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
    return not norms or bool(torch.stack(norms).isfinite().all().item())


def write_manifest(step_dir: str | Path, finite: bool) -> None:
    """Write the manifest of existing files; call it on every rank, each reads its share."""
    names = read_once(_names_in, step_dir)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = from_all_ranks({name: _sum_of(Path(step_dir) / name) for name in names[rank::ranks]})
    if rank == 0:
        files: dict[str, Sum] = {}
        for share in shares:
            files |= share
        manifest = Manifest(files, finite=finite)
        write_whole(Path(step_dir) / MANIFEST, manifest.as_json())


def _names_in(step_dir: str | Path) -> list[str]:
    names = [path.name for path in Path(step_dir).iterdir() if path.is_file()]
    return sorted(name for name in names if name != MANIFEST)


def find_damage(
    step_dir: str | Path,
    rank: int = 0,
    ranks: int = 1,
    files: dict[str, Sum] | None = None,
    allow_unverified: bool = False,
) -> str | None:
    """Compare one rank's share of a checkpoint's files with its manifest.

    Args:
        step_dir: The checkpoint's folder.
        rank: Number of the share to verify.
        ranks: Number of shares.
        files: Size and checksum of every file, if another rank has read the manifest.
        allow_unverified: Whether to compare with DCP's table of contents instead, which detects
            missing and truncated files, if there is no manifest that can be used.

    Returns:
        The damaged file and its damage; None if this share is whole.
    """
    try:
        files = _files_of(step_dir, allow_unverified) if files is None else files
        names = sorted(files, key=lambda name: (-files[name][0], name))
        for name in share_of(names, rank, ranks):
            size, *checksum = files[name]
            try:
                path = file_within(Path(step_dir), name)
                found = path.stat().st_size
                # The table of contents does not know what follows a file's last tensor.
                if found < size or (found > size and checksum):
                    raise DamagedError(f"{name} has {found} bytes instead of {size}")
                if checksum and _sum_of(path) != [size, *checksum]:
                    raise DamagedError(f"{name} has another checksum than when it was saved")
            except FileNotFoundError as error:
                raise DamagedError(f"{name} is missing") from error
            except OSError as error:
                raise DamagedError(f"{name} cannot be read ({describe(error)})") from error
        if rank == 0:
            unnamed = _stored_files(step_dir) - files.keys()
            if unnamed and not allow_unverified:
                raise UnverifiedError(f"{MANIFEST} does not name {min(unnamed)}")
    except DamagedError as error:
        return str(error)
    return None


def _files_of(step_dir: str | Path, allow_unverified: bool) -> dict[str, Sum]:
    try:
        return read_manifest(step_dir).files
    except UnverifiedError:
        # A save that a kill cut off: no key makes it whole.
        if not (is_dcp(step_dir) or (Path(step_dir) / HF_INDEX).exists()):
            raise DamagedError(f"{METADATA} is missing") from None
        if not allow_unverified:
            raise
    files: dict[str, Sum] = {}
    for info in read_metadata(step_dir).storage_data.values():
        known = files.setdefault(info.relative_path, [0])
        known[0] = max(known[0], info.offset + info.length)
    return files


def _stored_files(step_dir: str | Path) -> set[str]:
    """Return the names of the files that a checkpoint's table of contents says it has."""
    if is_dcp(step_dir):
        stored = read_metadata(step_dir).storage_data.values()
        return {METADATA, *(info.relative_path for info in stored)}
    try:
        return {HF_INDEX, *map(str, read_json(Path(step_dir) / HF_INDEX)["weight_map"].values())}
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise DamagedError(f"{HF_INDEX} cannot be read ({describe(error)})") from error


def share_of(names: list[str], rank: int, ranks: int) -> list[str]:
    """Return the files that a rank verifies; every file is in the share of one rank.

    ``names`` has all files, the largest first.
    """
    # A rank verifies what the rank of its number wrote. With another number of ranks, consecutive
    # writers have the same verifier, as FSDP's shards have the same reader.
    writers = {name: int(found[1]) for name in names if (found := _PART.fullmatch(name))}
    places = {writer: place for place, writer in enumerate(sorted(set(writers.values())))}
    mine = [name for name, w in writers.items() if places[w] * ranks // len(places) == rank]
    others = [name for name in names if name not in writers]
    return mine + others[rank::ranks]


def damage_of(step_dir: str | Path, allow_unverified: bool = False) -> str | None:
    """As `find_damage` of the whole checkpoint; call it on every rank, each reads its share."""
    if not dist.is_initialized():
        return find_damage(step_dir, allow_unverified=allow_unverified)
    try:
        files = read_once(partial(_files_of, allow_unverified=allow_unverified), step_dir)
    except DamagedError as error:
        return str(error)
    share = dist.get_rank(), dist.get_world_size()
    damage = find_damage(step_dir, *share, files, allow_unverified)
    rank = first_rank_where(damage is not None)
    return None if rank is None else from_first_rank(damage, rank)


def read_once(read: Callable[[str | Path], T], step_dir: str | Path) -> T:
    """Return what the first rank reads; a thousand would read the same file at the same moment.

    Raises:
        DamagedError: The first rank cannot read it; on every rank.
    """
    found: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found[0] = read(step_dir)
        except DamagedError as error:
            found[1] = str(error)
    value, damage = from_first_rank(found)
    if damage is not None:
        raise DamagedError(damage)
    return cast(T, value)


def newest_whole_before(step_dir: str | Path, allow_unverified: bool = False) -> str | None:
    """Return the folder of the newest whole step before a damaged one; call it on every rank."""
    for older in read_once(_steps_before, step_dir):
        if damage_of(older, allow_unverified) is None:
            return older
    return None


def _steps_before(step_dir: str | Path) -> list[str]:
    """Return the folders of the steps before one that could be resumed, newest first."""
    folder, name = os.path.split(os.path.normpath(step_dir))
    number = name.removeprefix("step-")
    steps = complete_steps(folder or ".") if number.isdecimal() else []
    older = [step_folder(folder, step) for step in reversed(steps) if step < int(number)]
    return [path for path in older if is_dcp(path) and is_finite(path)]


def _sum_of(path: Path) -> Sum:
    size, checksum, buffer = 0, 0, bytearray(_CHUNK)
    with open_regular(path, sys.maxsize) as file:
        while count := file.readinto(buffer):
            size, checksum = size + count, zlib.crc32(memoryview(buffer)[:count], checksum)
    return [size, checksum]


class _Results(list[WriteResult]):
    """DCP's results that a rank sends to the first one, with what the manifest needs."""

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
    """Computes checksums of written files, and writes the manifest before the final renaming."""

    sums: dict[str, Sum]
    manifest: Manifest | None = None

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

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        # The writer has no other hook between the last file and the final renaming.
        if self.manifest is not None and Path(new_path).name == METADATA:
            self.manifest.files[METADATA] = self.sums[Path(path).name]
            write_whole(Path(new_path).with_name(MANIFEST), self.manifest.as_json())
        super().rename(path, new_path)
