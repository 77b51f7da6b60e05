"""Choose how a part of the data is loaded: kept in memory as tensors, or by torch's DataLoader."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch

from framework.config.schema import LoaderKind
from framework.data.decoded import decode
from framework.data.tensor_samples import TensorRows, rows_of
from framework.system.formatting import format_bytes
from framework.system.hardware import available_memory, threads_per_process
from framework.types import MapDataset

MAX_WORKERS = 8
DEVICE_SHARE = 0.25
"""Of the device's free memory, for all parts of the data together: model and activations need the rest."""

_log = logging.getLogger("framework")


@dataclass(frozen=True)
class LoaderOptions:
    """What `data.loader` and `data.num_workers` ask for, and how many processes share this node."""

    kind: LoaderKind = "auto"
    # None: as many as suit.
    num_workers: int | None = None
    procs_on_node: int = 1
    procs_on_device: int = 1
    # Processes that share this one's cores; None: all of the node.
    procs_on_cores: int | None = None
    # Log the choice, which one rank does for all.
    logs: bool = False


class LoaderChoice(NamedTuple):
    """How a part is loaded."""

    rows: TensorRows | None  # in memory; None: loaded sample by sample
    num_workers: int
    why: str


def choose_loader(dataset: MapDataset, *, part: str, device: torch.device, options: LoaderOptions) -> LoaderChoice:
    """Choose, and decode what is kept. Each rank may choose for itself: the numbers are the same either way.

    Raises DataError if data that must be resident can't be; RunError if the dataset raises.
    """
    choice = _choose(dataset, part=part, device=device, options=options)
    if options.logs:
        _log.info("data: the %s part is %s", part, choice.why)
    return choice


def worker_count(*, procs: int) -> int:
    """Return the loader processes for one of `procs` on the same cores: its share minus one, at most 8."""
    return min(MAX_WORKERS, threads_per_process(procs) - 1)


def _choose(dataset: MapDataset, *, part: str, device: torch.device, options: LoaderOptions) -> LoaderChoice:
    if options.kind == "dataloader":
        return _data_loader(options, "data.loader=dataloader")
    if options.kind == "auto" and options.num_workers:
        return _data_loader(options, f"data.num_workers={options.num_workers}")
    rows = rows_of(dataset)
    if rows is not None:
        return _resident(rows, "tensors already", device=device, options=options)
    if options.kind == "resident":
        available = available_memory()
        limit = None if available is None else available // options.procs_on_node
        return _resident(decode(dataset, part=part, limit_bytes=limit), "decoded once", device=device, options=options)
    return _data_loader(options, f"a {type(dataset).__name__}, which data.loader=resident would decode once")


def _resident(rows: TensorRows, how: str, *, device: torch.device, options: LoaderOptions) -> LoaderChoice:
    size = format_bytes(rows.size_bytes)
    if rows.device != device:
        limit = device_limit(device, procs=options.procs_on_device)
        if rows.size_bytes > limit:
            why = f"{size}, and {format_bytes(limit)} of {device} are for it"
            return LoaderChoice(rows, 0, f"resident in the host's memory ({how}; {why})")
    return LoaderChoice(rows.to(device), 0, f"resident in the memory of {device} ({how}, {size})")


def _data_loader(options: LoaderOptions, why: str) -> LoaderChoice:
    procs = options.procs_on_cores or options.procs_on_node
    number = worker_count(procs=procs) if options.num_workers is None else options.num_workers
    who = f"by {number} worker process(es)" if number else "in this process"
    return LoaderChoice(None, number, f"loaded sample by sample {who} ({why})")


def device_limit(device: torch.device, *, procs: int) -> int:
    """Return the bytes that one of `procs` processes may still keep on an accelerator; 0 if it doesn't say, as `mps`.

    Call it before there is a model: what this process has on the device then are parts of the data, and they count.
    """
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("mem_get_info", "memory_reserved", "memory_allocated")):
        return 0
    free_bytes, _ = module.mem_get_info(device)
    share_bytes = int((free_bytes + module.memory_reserved(device)) * DEVICE_SHARE) // procs
    return max(0, share_bytes - int(module.memory_allocated(device)))
