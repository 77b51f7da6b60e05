"""Which way a part of the data is loaded: kept in memory as tensors, or by torch's DataLoader."""

from __future__ import annotations

import logging
import timeit
from dataclasses import dataclass
from typing import NamedTuple

import torch

from framework.config.schema import LoaderKind
from framework.data.decoding import UndecodableError, decoded, is_known_to_repeat, sample_bytes
from framework.data.fetch import preserved_generators
from framework.data.room import device_room, host_available, host_room
from framework.data.rows import Pieces, Rows, rows_of
from framework.errors import DataError
from framework.hardware import threads_per_process
from framework.types import MapDataset

MOST_WORKERS = 8
MOST_DECODING_S = 60.0
"""What `auto` may spend before the first step, in each process."""

_log = logging.getLogger("framework")


@dataclass(frozen=True)
class Loading:
    """What `data.loader` and `data.num_workers` ask for, and who else is on this node.

    num_workers: loader processes; None: as many as suit. procs: processes of this node; sharing: those of them that
    use this one's device; core_sharers: those that have this one's cores, None: all. tells: log what was chosen, which
    one rank does for all.
    """

    kind: LoaderKind = LoaderKind.AUTO
    num_workers: int | None = None
    procs: int = 1
    sharing: int = 1
    core_sharers: int | None = None
    tells: bool = False


class Choice(NamedTuple):
    """rows: the samples in memory, None where they are loaded one by one; num_workers: by so many processes."""

    rows: Rows | None
    num_workers: int
    why: str


def choose(dataset: MapDataset, *, part: str, device: torch.device, loading: Loading) -> Choice:
    """Decide, and decode what is kept. Every rank may call it for itself: the numbers are the same either way.

    Raises DataError where data that has to be resident can't be; RunError where the dataset raises.
    """
    choice = _choose(dataset, part=part, device=device, loading=loading)
    if loading.tells:
        _log.info("data: the %s part is %s", part, choice.why)
    return choice


def worker_count(*, procs: int) -> int:
    """Loader processes for one of `procs` on the same cores: its share without its own, at most 8; may be 0."""
    return min(MOST_WORKERS, threads_per_process(procs) - 1)


def _choose(dataset: MapDataset, *, part: str, device: torch.device, loading: Loading) -> Choice:
    if loading.kind is LoaderKind.DATALOADER:
        return _by_dataloader(loading, "data.loader=dataloader")
    if loading.kind is LoaderKind.AUTO and loading.num_workers:
        return _by_dataloader(loading, f"data.num_workers={loading.num_workers}")
    rows, how = rows_of(dataset), "tensors already"
    if isinstance(rows, Pieces):
        return _joined(rows, part=part, device=device, loading=loading)
    if rows is None:
        forced = loading.kind is LoaderKind.RESIDENT
        if not forced and not is_known_to_repeat(dataset):
            return _by_dataloader(loading, f"a {type(dataset).__name__} may give other samples each time")
        try:
            size_bytes = sample_bytes(dataset, part=part) * len(dataset)
            refusal = _no_room(size_bytes, "decoded", part=part, loading=loading)
            if refusal is None and not forced:
                refusal = _no_time(dataset)
            if refusal is not None:
                return _by_dataloader(loading, refusal)
            rows, how = decoded(dataset, part=part), "decoded once"
        except UndecodableError as error:
            if forced:
                raise DataError(
                    f"{error}\ndata.loader=resident keeps samples as they come once. Use data.loader=dataloader, or "
                    "give framework.TensorSamples and a transform of batches, such as those of framework.transforms."
                ) from error
            return _by_dataloader(loading, str(error))
    return _placed(rows, how, device=device, loading=loading)


def _no_time(dataset: MapDataset) -> str | None:
    """Why a dataset, of which a sample has been loaded, isn't decoded whole before the first step."""
    with preserved_generators():
        seconds = min(timeit.repeat(lambda: dataset[0], number=1, repeat=3)) * len(dataset)
    return None if seconds <= MOST_DECODING_S else f"decoding all of it would take about {seconds:,.0f} s"


def _no_room(size_bytes: int, made: str, *, part: str, loading: Loading) -> str | None:
    """Why samples of so many bytes can't be made (decoded, joined) on the host; raises DataError where they have to be.

    What has to be is tried where the system doesn't tell how much memory is available.
    """
    forced, room = loading.kind is LoaderKind.RESIDENT, host_room(procs=loading.procs)
    if forced:
        available = host_available()
        room = size_bytes if available is None else available // loading.procs
    if size_bytes <= room:
        return None
    text = f"{made} it takes {_megabytes(size_bytes)}, and {_megabytes(room)} of the host's memory are for it"
    if forced:
        raise DataError(
            f"The {part} dataset can't be resident: {text} in each process. Use data.loader=dataloader, or less data."
        )
    return text


def _joined(pieces: Pieces, *, part: str, device: torch.device, loading: Loading) -> Choice:
    """Copied to one place, straight to the device where it fits there; where that is too much, gathered as they lie."""
    how = "tensors joined"
    if pieces.device != device and pieces.size_bytes <= device_room(device, sharing=loading.sharing):
        return _placed(pieces.copied(device), how, device=device, loading=loading)
    if pieces.device.type == "cpu":
        refusal = _no_room(pieces.size_bytes, "joined", part=part, loading=loading)
        if refusal is not None:
            return _by_dataloader(loading, refusal)
    return _placed(pieces.copied(pieces.device), how, device=device, loading=loading)


def _placed(rows: Rows, how: str, *, device: torch.device, loading: Loading) -> Choice:
    size = _megabytes(rows.size_bytes)
    if rows.device == device:
        return Choice(rows, 0, f"resident in the memory of {device} ({how}, {size})")
    room = device_room(device, sharing=loading.sharing)
    if rows.size_bytes <= room:
        return Choice(rows.on(device), 0, f"resident in the memory of {device} ({how}, {size})")
    why = f"{size}, and {_megabytes(room)} of {device} are for it"
    return Choice(rows, 0, f"resident in the host's memory ({how}; {why})")


def _by_dataloader(loading: Loading, why: str) -> Choice:
    procs = loading.core_sharers or loading.procs
    number = worker_count(procs=procs) if loading.num_workers is None else loading.num_workers
    who = f"by {number} worker process(es)" if number else "in this process"
    return Choice(None, number, f"loaded sample by sample {who} ({why})")


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
