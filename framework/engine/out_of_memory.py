"""What a rank had allocated when it ran out of memory: by category, the largest entries by name, torch's snapshot."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from framework.distributed.storages import storages
from framework.launch.error_record import error_chain, text_of
from framework.monitoring.failure import OUT_OF_MEMORY
from framework.system.rank_log import warn
from framework.training.trainer import Trainer

_SHOWN_ENTRIES = 5
_NAMELESS = "activations and temporaries"


class _Entry(NamedTuple):
    """A piece of memory that belongs to the model or its optimizer."""

    category: str
    module: str
    address: int
    size_bytes: int


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error or one that led to it is for lack of memory: torch's, Python's, or an allocator's."""
    if error is None:
        return False
    for link in error_chain(error):
        # A user's exception may raise when it is asked for its class or its text.
        kind = type(link)
        if issubclass(kind, (torch.OutOfMemoryError, MemoryError)):
            return True
        if issubclass(kind, RuntimeError) and OUT_OF_MEMORY.search(text_of(link)):
            return True
    return False


def memory_at_failure(error: BaseException, trainer: Trainer, *, snapshot: Path) -> dict[str, Any] | None:
    """Return what this rank has allocated now, as `RankFailure.memory`; None if the error isn't for lack of memory.

    On the CPU, where torch counts no allocations, activations are left out.

    Args:
        snapshot: the file for torch's snapshot of a GPU's memory, https://pytorch.org/memory_viz shows it.
    """
    if not is_out_of_memory(error):
        return None
    try:
        return _memory(trainer, snapshot)
    except Exception as fault:
        # A device that answers nothing more, or no memory for this either: the failure itself is still to be reported.
        warn(f"What was allocated can't be shown: {fault}")
        return None


def _memory(trainer: Trainer, snapshot: Path) -> dict[str, Any]:
    # A weight that is tied has two names and is there once.
    entries = {entry.address: entry for entry in _entries(trainer)}
    by_category = dict.fromkeys(("weights", "gradients", "optimizer"), 0)
    by_name: Counter[tuple[str, str]] = Counter()
    for entry in entries.values():
        by_category[entry.category] += entry.size_bytes
        by_name[entry.category, entry.module] += entry.size_bytes
    memory: dict[str, Any] = {"allocated_bytes": None, "capacity_bytes": None, "snapshot": None}

    device = trainer.state.context.device
    if device.type != "cpu":
        _, memory["capacity_bytes"] = torch.accelerator.get_memory_info(device)
        memory["allocated_bytes"] = torch.accelerator.memory_allocated(device)
        by_category[_NAMELESS] = max(0, memory["allocated_bytes"] - sum(by_category.values()))
    if device.type == "cuda":
        by_name.update(_nameless_blocks(device, set(entries)))
        memory["snapshot"] = _save_snapshot(snapshot)
    largest = []
    for (category, name), size_bytes in by_name.most_common(_SHOWN_ENTRIES):
        largest.append({"category": category, "name": name, "size_bytes": size_bytes})
    return {**memory, "by_category": by_category, "largest": largest}


def _save_snapshot(file: Path) -> str | None:
    """Return the path of torch's snapshot; None if it can't be written."""
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    except OSError as error:
        # A full disk: what was allocated is known all the same.
        warn(f"torch's snapshot of the memory can't be written: {error}")
        file.unlink(missing_ok=True)
        return None
    return str(file)


def _entries(trainer: Trainer) -> Iterator[_Entry]:
    model = trainer.state.bare_model
    modules: dict[Tensor, str] = {}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        module = name.rpartition(".")[0]
        modules[weight] = module
        yield from _entries_of("weights", module, weight)
        if weight.grad is not None:
            yield from _entries_of("gradients", module, weight.grad)
    for optimizer in trainer.state.optimizers:
        for weight, state in optimizer.state.items():
            for value in tree_leaves(state):
                if isinstance(value, Tensor):
                    yield from _entries_of("optimizer", modules.get(weight, ""), value)


def _entries_of(category: str, module: str, tensor: Tensor) -> Iterator[_Entry]:
    for storage in storages(tensor):
        yield _Entry(category, module, storage.data_ptr(), storage.nbytes())


def _nameless_blocks(device: torch.device, known: set[int]) -> Counter[tuple[str, str]]:
    """Return the blocks of a GPU's memory that are none of the known ones, by the lines that allocated them.

    torch knows the lines if its memory history is recorded (`torch.cuda.memory._record_memory_history`).
    """
    sizes: Counter[tuple[str, str]] = Counter()
    for segment in torch.cuda.memory._snapshot()["segments"]:
        if segment["device"] != device.index:
            continue
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["address"] not in known:
                sizes[_NAMELESS, _line(block.get("frames", ()))] += block["size"]
    return sizes


def _line(frames: Any) -> str:
    folder = f"{Path(torch.__file__).parent}{os.sep}"
    for frame in frames:
        if frame["filename"].endswith(".py") and not frame["filename"].startswith(folder):
            return f"{frame['filename']}:{frame['line']}"
    return ""
