"""Write and read the tensors of a sharded model, through torch.distributed.checkpoint (DCP).

    step_00001200/
      sharded/__1_0.distcp   what rank 1 has of the weights and of the optimizer's state
      sharded/.metadata      which shard of which tensor is in which file
      training.pt ...        as in every checkpoint, by rank 0; but there is no model.pt

Torch's own tools can read the folder. It holds tensors only, so reading it need not unpickle objects. The index,
`.metadata`, is a pickle, which torch would let call anything: here it may make the few classes that torch writes there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from framework.checkpoint.direct_io import ChecksummedFile, DirectFile
from framework.checkpoint.layout import SHARDS, SHARDS_INDEX, Manifest
from framework.distributed.sharded import local_tensor
from framework.errors import CheckpointError, DiskError, RunError
from framework.system.files import FileFacts, read_bytes


@final
@dataclass(frozen=True)
class Shards:
    """What one rank writes."""

    # Its shard of each tensor, by the tensor's name.
    tensors: Mapping[str, Tensor]
    # Where each shard belongs.
    items: list[WriteItem]
    # A group of all ranks. It is used for nothing else, so that each rank may wait for the slowest while training
    # continues.
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Shards:
        """Return this rank's shards of the tensors, sharing their memory. Doesn't communicate."""
        items = create_default_local_save_plan(dict(tensors), is_coordinator=False).items
        return Shards({name: local_tensor(tensor) for name, tensor in tensors.items()}, items)

    def write(
        self, directory: Path, *, begin: Callable[[], object], finish: Callable[[dict[str, FileFacts]], object]
    ) -> None:
        """Write every rank's shards into a checkpoint's directory; they are on the disk when this returns.

        Every rank must call it. If a rank fails, all raise: DiskError if disks refused, else RunError.

        Args:
            begin: called on rank 0 before the first shard is written.
            finish: called on rank 0 with the facts of all ranks' files, once they are written.
        """
        writer = _Writer(directory / SHARDS, begin=begin, finish=finish)
        try:
            dcp.save({}, storage_writer=writer, planner=_Planner(self), process_group=self.group)
        # For torch this is a BaseException.
        except CheckpointException as error:
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            text = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
            is_disk = all(isinstance(cause, (OSError, DiskError)) for cause in causes.values())
            error_class = DiskError if is_disk else RunError
            raise error_class(f"The shards of {directory} can't be written: {text}") from error


@final
class _Planner(DefaultSavePlanner):
    """Plans shards that are known already, instead of looking at tensors that training has changed since."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._shards.items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._shards.tensors[write_item.index.fqn]


@final
class _Writer(FileSystemWriter):
    """Torch's writer, with checksums of its files, between `begin` and `finish` on rank 0."""

    def __init__(self, folder: Path, *, begin: Callable[[], object], finish: Callable[[Any], object]) -> None:
        # DirectFile flushes the files to the disk.
        super().__init__(folder, sync_files=False)
        self._files = _Files()
        self.fs = self._files
        self._begin = begin
        self._finish = finish

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # The folder is made later, once rank 0 has begun.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        """Return what `finish` gets of this rank: torch's results and the facts of the files."""
        self.fs.mkdir(self.path)
        return super().write_data(plan, planner).then(lambda written: (written.value(), self._files.facts))

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, [written for written, _ in results])
        facts: dict[str, FileFacts] = {}
        for _, facts_of_rank in results:
            facts |= facts_of_rank
        # The index was written just now.
        facts |= self._files.facts
        self._finish({f"{SHARDS}/{name}": file_facts for name, file_facts in facts.items()})

    def storage_meta(self) -> StorageMeta:
        """Leave out the path, which is a temporary one."""
        return StorageMeta(save_id=self.save_id)


@final
class _Files(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        # The facts of each file that was written, by its name.
        self.facts: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with DirectFile(Path(path)) as file:
            checksummed = ChecksummedFile(file)
            yield checksummed
            self.facts[Path(path).name] = checksummed.finish()
            file.finish()

    def mkdir(self, path: Any) -> None:
        """Make a folder in one that rank 0 has made. Torch would make that one, too."""
        folder = Path(path)
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            raise DiskError(
                f"{folder.parent}, which rank 0 has made, isn't there.\n"
                "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
            ) from error

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)


# Reading


def read_shards(directory: Path, index: Metadata, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets, plain tensors or DTensors, with this process's shards of them. Doesn't communicate.

    Raises CheckpointError if a shard holds Python objects.
    """
    # Torch's own classes without `dcp.load`, which would unpickle the index, and communicate.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index, is_coordinator=True)
    reader = FileSystemReader(directory / SHARDS)
    reader.set_up_storage_reader(index, True)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"A shard of {directory} holds Python objects, which could run any code: {error}"
        ) from error


def read_index(directory: Path, manifest: Manifest) -> Metadata:
    """Return the index of the shards of a step directory: only tensors, each shard in one of the manifest's files.

    Raises CheckpointError for anything else.
    """
    try:
        content = read_bytes(directory / SHARDS_INDEX, max_bytes=manifest.files[SHARDS_INDEX].size_bytes)
        index: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if not all(isinstance(entry, TensorStorageMetadata) for entry in index.state_dict_metadata.values()):
            raise TypeError("it has entries that are no tensors")
        for place in index.storage_data.values():
            if f"{SHARDS}/{place.relative_path}" not in manifest.files:
                raise ValueError(f"it names the file {place.relative_path}, which isn't one of the checkpoint's")
        return index
    # Whatever a damaged or forged pickle may raise: it names classes and gives them arguments.
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {directory} was not read: its {SHARDS_INDEX} isn't an index of plain tensors ({error})."
        ) from error


def tensors_of(index: Metadata, *, prefix: str = "") -> dict[str, TensorStorageMetadata]:
    """Return the entries whose names begin with `prefix`."""
    # `read_index` lets only tensors pass.
    entries: Any = index.state_dict_metadata
    return {name: entry for name, entry in entries.items() if name.startswith(prefix)}


# What an index consists of, besides torch's dtypes.
_ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata,
        TensorStorageMetadata,
        StorageMeta,
        dcp_metadata.MetadataIndex,
        dcp_metadata.TensorProperties,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


@final
class _IndexUnpickler(pickle.Unpickler):
    """Makes objects of _ALLOWED, and never hands out a class itself, so that nothing can be written into it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _maker(_ALLOWED[module, name])
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        raise pickle.UnpicklingError(f"{module}.{name} isn't allowed in it")


def _maker(made: Any) -> type:
    """Return a class made for this one use, whose instances are what `made` makes."""

    def new(_: type, *args: Any) -> Any:
        if args:
            # A member of an Enum is found by calling the class.
            return made(*args)
        # What follows in the pickle fills the object.
        return made.__new__(made)

    return type(made.__name__, (), {"__new__": new, "made": made})


def _member(maker: Any, name: str) -> Any:
    """Return a memory format by its name: Python 3.11.2, Debian 12's, pickles a member of an Enum as a `getattr`."""
    formats = dcp_metadata._MEM_FORMAT_ENCODING
    if getattr(maker, "made", None) is not formats:
        raise pickle.UnpicklingError("builtins.getattr isn't allowed in it")
    return formats[name]
