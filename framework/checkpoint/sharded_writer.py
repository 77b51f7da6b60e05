"""Write the tensors of a sharded model, all ranks together, through torch.distributed.checkpoint (DCP).

    step_00001200/
      sharded/__1_0.distcp   what rank 1 has of the weights and of the optimizer's state
      sharded/.metadata      which shard of which tensor is in which file
      training.pt ...        as in every checkpoint, by rank 0; but there is no model.pt

Shards hold tensors only, named `model.NAME` and `optimizer.PARAMETER.NAME`, so that reading them unpickles nothing, and
torch's own tools can read the folder. All else is in training.pt, with a note of what was taken out of it.

Of a model in pipeline stages, parameters are numbered as an optimizer of the whole model would number them. So a
checkpoint of any number of ranks is read by any other number, see sharded_reader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.optim import Optimizer

from framework.checkpoint.direct_io import ChecksummedFile
from framework.checkpoint.layout import SHARDS, FileFacts
from framework.distributed.sharded import is_dtensor, layout_of, local_tensor
from framework.errors import CheckpointError, DiskError, RunError

NOTE = "sharded"
"""The entry of `training` that says what is in the shards."""

MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


# The state, split into tensors for the shards and the rest


class ShardedState(NamedTuple):
    # Live tensors that this rank writes a shard of, by their names in the shards.
    tensors: dict[str, Tensor]
    # The state dict of the whole model's optimizer, without its tensors that are in the shards.
    optimizer: dict[str, Any]
    # For `training[NOTE]`: the model's entries that are no tensors, and for each tensor of the optimizer
    # [number of the parameter, name in its state, name in the shards].
    note: dict[str, Any]


def split_state(model: nn.Module, optimizer: Optimizer) -> ShardedState:
    """Return what goes into the shards and what doesn't. Every rank must call it: ranks with stages communicate."""
    layout = layout_of(model)
    state = model.state_dict()  # first: it leaves only the sharded parameters in the model, which are the optimizer's
    tensors = {MODEL_PREFIX + name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters, numbers = parameters_of(optimizer), whole_numbers(model, optimizer)
    own = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    taken: dict[tuple[int, str], str] = {}
    for index, entry in own["state"].items():
        number = numbers[index]
        entries[number] = {}
        for name, value in entry.items():
            if is_dtensor(value) or (layout is not None and isinstance(value, Tensor) and value.ndim):
                key = taken[number, name] = f"{OPTIMIZER_PREFIX}{names[id(parameters[index])]}.{name}"
                tensors[key] = value
            else:
                entries[number][name] = value
    groups = [{**group, "params": [numbers[index] for index in group["params"]]} for group in own["param_groups"]]
    if layout is None:
        tensors = {name: value for index, (name, value) in enumerate(tensors.items()) if _is_its_turn(value, index)}
    else:
        of_ranks = _gather((entries, taken, groups))
        entries = {number: entry for each, _, _ in of_ranks for number, entry in each.items()}
        taken = {place: key for _, each, _ in of_ranks for place, key in each.items()}
        for index, group in enumerate(groups):
            group["params"] = sorted({number for _, _, each in of_ranks for number in each[index]["params"]})
        if not layout.writes:  # another rank has the same stages and writes them
            tensors = {}
    whole = {"state": dict(sorted(entries.items())), "param_groups": groups}
    note = [[number, name, key] for (number, name), key in sorted(taken.items())]
    return ShardedState(tensors, whole, {"model": rest, "optimizer": note})


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order of their numbers in the optimizer's state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def whole_numbers(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """Return the numbers that an optimizer of the whole model would give to this optimizer's parameters, in order.

    It counts group by group, in the model's order. Every rank must call it: ranks with stages communicate.
    """
    layout = layout_of(model)
    if layout is None:
        return [*range(len(parameters_of(optimizer)))]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {name: place for place, name in enumerate(layout.parameters)}
    groups = [[places[names[id(parameter)]] for parameter in group["params"]] for group in optimizer.param_groups]
    of_ranks = _gather(groups)
    if any(len(each) != len(groups) for each in of_ranks):
        raise CheckpointError(
            "The optimizer has different numbers of parameter groups for different stages, so their state can't be "
            "saved as one. Let it make the same number of groups for any parameters, empty ones too."
        )
    whole = chain.from_iterable(sorted({*chain(*group)}) for group in zip(*of_ranks, strict=True))
    numbers = {place: number for number, place in enumerate(whole)}
    return [numbers[place] for place in chain(*groups)]


def _is_its_turn(tensor: Tensor, index: int) -> bool:
    """Return True if this rank writes the tensor, or its shard of it. Rank 0 writes what isn't sharded.

    Ranks with copies of the same shard take turns, so that each copies and writes as much.
    """
    if not is_dtensor(tensor):
        return dist.get_rank() == 0
    spread: Any = tensor
    mesh, copies, own = spread.device_mesh, 1, 0
    for place, size, placement in zip(mesh.get_coordinate(), mesh.shape, spread.placements, strict=True):
        if placement.is_replicate():
            copies, own = copies * size, own * size + place
    return index % copies == own


def _gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


# Writing, beside the training


@final
@dataclass(frozen=True)
class Shards:
    """What one rank writes: its shard of each tensor, by the tensor's name, and where each shard belongs.

    All ranks write together, through a process group that is used for nothing else: each may wait for the slowest in a
    thread while training continues, at most as long as the time-out.
    """

    tensors: Mapping[str, Tensor]
    items: list[WriteItem]
    group: dist.ProcessGroup | None

    @staticmethod
    def of(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> Shards:
        """Return this rank's shards, sharing memory with `tensors`. Doesn't communicate."""
        items = create_default_local_save_plan(dict(tensors), is_coordinator=False).items
        return Shards({name: local_tensor(tensor) for name, tensor in tensors.items()}, items, group)

    @property
    def is_first_rank(self) -> bool:
        return dist.get_rank(self.group) == 0

    def on_first_rank(self, action: Callable[[], object]) -> None:
        """Do something on rank 0. Every rank must call it; if it fails, the others raise DiskError."""
        error: BaseException | None = None
        if self.is_first_rank:
            try:
                action()
            except BaseException as raised:  # the other ranks wait for it, whatever it is
                error = raised
        fault = _gather(error and str(error), self.group)[0]
        if error is not None:
            raise error
        if fault is not None:
            raise DiskError(fault)

    def write(self, directory: Path) -> dict[str, FileFacts]:
        """Write every rank's shards into the directory of a checkpoint; they are on the disk when this returns.

        Every rank must call it. Returns the facts of all ranks' files, the same on every rank. If a rank fails, all
        raise: DiskError if disks refused, else RunError.
        """
        writer = _Writer(directory / SHARDS)
        try:
            dcp.save({}, storage_writer=writer, planner=_Planner(self), process_group=self.group)
        except CheckpointException as error:  # not an Exception, for torch
            causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            shown = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
            kind = DiskError if all(isinstance(cause, OSError) for cause in causes.values()) else RunError
            raise kind(f"The shards of {directory.name} can't be written to {directory.parent}: {shown}") from error
        of_ranks = _gather(writer.files.facts, self.group)
        return {f"{SHARDS}/{name}": facts for each in of_ranks for name, facts in each.items()}


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
    """Torch's writer, with checksums of its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # ChecksummedFile does that
        self.files = _Files()
        self.fs = self.files

    def storage_meta(self) -> StorageMeta:
        """Leave out the path, which is a temporary one."""
        return StorageMeta(save_id=self.save_id)


@final
class _Files(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, FileFacts] = {}  # of each file that was written, by its name

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with ChecksummedFile(Path(path)) as file:
            yield file
            self.facts[Path(path).name] = file.finish()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.facts[Path(new_path).name] = self.facts.pop(Path(path).name)
