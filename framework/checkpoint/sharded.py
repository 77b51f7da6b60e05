"""Tensors that are spread over ranks, written by all of them through torch.distributed.checkpoint (DCP).

    step_00001200/
      sharded/__1_0.distcp   what rank 1 holds of the weights and of the optimizer's state
      sharded/.metadata      which part of which tensor lies where
      training.pt ...        as in every checkpoint, by rank 0; but there is no model.pt

Shards hold tensors only, so that reading them unpickles nothing: all else is in training.pt. Torch's own tools can read
the folder too.

Writing uses nothing but the files and a process group, which may be one for a thread of its own on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from framework.checkpoint.files import ChecksummedFile
from framework.checkpoint.format import SHARDS, FileFacts
from framework.distributed.tensors import is_spread, local
from framework.errors import DiskError, RunError


@final
@dataclass(frozen=True)
class Shards:
    """What one rank writes. tensors: its part of each tensor, by the tensor's name; items: where each part belongs."""

    tensors: Mapping[str, Tensor]
    items: tuple[WriteItem, ...]

    def of_copies(self, copies: Mapping[str, Tensor]) -> Shards:
        """The same parts with these values, on the CPU: what is written while training changes the others."""
        return Shards(copies, self.items)


def shards_of(tensors: Mapping[str, Tensor], *, is_first: bool) -> Shards:
    """This rank's parts, sharing memory with `tensors`; of plain tensors, the same on every rank, one rank writes all.

    Where several ranks hold the same part, as with several copies of a model, one of them writes it: of each tensor
    another one, in turn. is_first: whether this rank writes what is on all. Exchanges nothing.
    """
    items: list[WriteItem] = []
    for number, (name, tensor) in enumerate(tensors.items()):
        if is_spread(tensor):
            spread: Any = tensor
            # A rank that is left without a row has nothing to write; of a tensor without rows, rank 0 says so.
            if (local(tensor).numel() and _is_its_turn(spread, number)) or (is_first and not tensor.numel()):
                items += spread.__create_write_items__(name, tensor)
        elif is_first:
            items.append(_whole(name, tensor))
    held = {item.index.fqn for item in items}
    return Shards({name: local(tensor) for name, tensor in tensors.items() if name in held}, tuple(items))


def write_shards(directory: Path, shards: Shards, *, group: dist.ProcessGroup | None) -> dict[str, FileFacts]:
    """Write every rank's parts below `directory` (of one checkpoint), on the disk when this returns.

    Every rank of `group` must call it; each waits as long as the group's time-out. Gives the facts of all ranks' files,
    with the folder in their names, the same on every rank. Where a rank fails, all raise: DiskError where disks refused
    or the ranks don't see the same one, RunError for another reason. Then what was written is no checkpoint; the caller
    deletes it.
    """
    writer = _Writer(directory / SHARDS)
    try:
        dcp.save({}, storage_writer=writer, planner=_Planner(shards), process_group=group)
    except CheckpointException as error:  # not an Exception, for torch
        raise _failure(directory, error) from error
    written: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(written, writer.files.facts, group=group)
    facts = {f"{SHARDS}/{name}": one for files in written for name, one in files.items()}
    _check_all_seen(directory, facts, group=group)
    return facts


def _check_all_seen(directory: Path, facts: Mapping[str, FileFacts], *, group: dist.ProcessGroup | None) -> None:
    """Raise DiskError on every rank where rank 0, which goes on with the directory, doesn't see all files."""
    missing = [name for name, one in facts.items() if _size(directory / name) != one.size_bytes]
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, missing, group=group)
    if seen[0]:
        raise DiskError(
            f"Rank 0 doesn't see all that the others have written to {directory}: {', '.join(seen[0][:4])}.\n"
            "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _failure(directory: Path, error: CheckpointException) -> RunError:
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    told = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
    kind = DiskError if all(isinstance(cause, OSError) for cause in causes.values()) else RunError
    return kind(f"The shards of {directory.name} can't be written to {directory.parent}: {told}")


def _is_its_turn(tensor: Any, number: int) -> bool:
    """Whether this rank, of those that hold the same part of the tensor, writes that of the tensor of this number."""
    copies, own = 1, 0
    for place, size, placement in zip(
        tensor.device_mesh.get_coordinate(), tensor.device_mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            copies, own = copies * size, own * size + place
    return number % copies == own


def _whole(name: str, tensor: Tensor) -> WriteItem:
    start = torch.Size([0] * tensor.ndim)
    return WriteItem(
        index=MetadataIndex(name, start),
        type=WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=tensor.size()),
            properties=TensorProperties.create_from_tensor(tensor),
            size=tensor.size(),
        ),
    )


@final
class _Planner(DefaultSavePlanner):
    """Plans parts that are known already, instead of looking at tensors that have gone on changing."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(list(self._shards.items))
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._shards.tensors[write_item.index.fqn]


@final
class _Writer(FileSystemWriter):
    """Torch's writer, with files that are summed up while they are written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # our files do that
        self.files = _Files()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is a temporary one."""
        return StorageMeta(save_id=self.save_id)


@final
class _Files(FileSystem):
    """facts: of each file that was written, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            raise ValueError(f"mode {mode!r}: these files are only written")
        with ChecksummedFile(Path(path)) as file:
            yield _Stream(file)
            self.facts[Path(path).name] = file.finish()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)


@final
class _Stream:
    """What DCP wants of a file: it asks for the place, and closes before it is done with it."""

    def __init__(self, file: ChecksummedFile) -> None:
        self._file = file
        self._place = 0

    def write(self, data: Any) -> int:
        written = self._file.write(cast(memoryview, data))
        self._place += written
        return written

    def tell(self) -> int:
        return self._place

    def flush(self) -> None:
        """Nothing yet: the file is flushed to the disk when it is finished."""

    def close(self) -> None:
        """Nothing yet: whoever made the file closes it."""
