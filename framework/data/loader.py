"""The batches of one rank, on its device: `MapLoader` for a map-style dataset, `EvalLoader` for evaluation."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Subset

from framework.config.schema import LoaderKind
from framework.data.batch_dataset import BatchDataset, BatchKey, BatchRequest
from framework.data.batch_lists import BatchLists
from framework.data.batching import BatchPlan
from framework.data.epochs import EpochSteps
from framework.data.identity import DataIdentity, check_content, check_order, check_size, checksum_of
from framework.data.order import GlobalOrder, WindowIndices, epoch_positions, listed_windows, windows
from framework.data.prefetch import pins_memory, prefetch
from framework.data.resident import ResidentBatches, decode
from framework.data.sample_check import NUM_SAMPLES, CheckedSamples, CheckKey
from framework.data.set_epoch import EpochListeners
from framework.data.sketch import sketch_rows
from framework.data.skipping import NO_SKIPS, EpochSkips, end_without_step, parts, parts_of_positions
from framework.data.source import SourceLoader
from framework.data.stream import StreamLoader
from framework.data.tensor_samples import TensorSamples, as_tensor_samples
from framework.data.transforms import Each
from framework.data.workers import ItemLoader
from framework.errors import DataError
from framework.system.formatting import format_bytes
from framework.system.hardware import available_memory, threads_per_process
from framework.system.rank_log import warn
from framework.types import Batch, Collate, MapDataset, MicroBatch, Order, Sampler, Span, Waiting, Window

MAX_WORKERS = 8
DEVICE_SHARE = 0.25
"""Of the device's free memory, for all data together: model and activations need the rest."""

_log = logging.getLogger("framework")


# How data is loaded


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
    collate_fn: Collate | None = None


IN_THIS_PROCESS = LoaderOptions(num_workers=0)
"""Without loader processes: tensors are kept in memory, other data is loaded sample by sample."""


@final
class LoadedBatches(ItemLoader):
    """Batches that torch's DataLoader loads in this process or by workers, and that are copied ahead to a device."""

    def __init__(
        self,
        dataset: MapDataset,
        *,
        split: str,
        seed: int,
        device: torch.device,
        num_workers: int,
        collate_fn: Collate | None = None,
    ) -> None:
        batches = BatchDataset(dataset, split=split, seed=seed, collate_fn=collate_fn)
        super().__init__(batches, name=f"{split} dataset", num_workers=num_workers, pin_memory=pins_memory(device))
        # The dataset of this process; workers have their own copies.
        self._batches = batches
        self._device = device
        self.num_workers = num_workers

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order."""
        return prefetch(self.items(map(BatchKey.of, requests)), self._device)

    def check(self, indices: list[int]) -> CheckedSamples:
        """Load samples twice, in a worker if there are any: files opened here might not survive the fork."""
        checked: CheckedSamples
        (checked,) = self.items([CheckKey(indices)])
        return checked

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of this process's dataset; workers do so before their first batch of the epoch."""
        self._batches.set_epoch(epoch)


def batch_source(
    dataset: MapDataset, *, split: str, seed: int, device: torch.device, options: LoaderOptions
) -> ResidentBatches | LoadedBatches:
    """Choose how a dataset is loaded: kept in memory as tensors, or by torch's DataLoader.

    Each rank may choose for itself: the numbers are the same either way. Raises DataError if data that must be resident
    can't be; RunError if the dataset raises.
    """
    if options.kind == "resident" and options.collate_fn is not None:
        raise DataError(
            f"data.loader=resident keeps the {split} samples as rows of tensors, and they have a collate function of "
            "their own.\nUse data.loader=auto."
        )
    samples = _resident_samples(dataset, split=split, options=options)
    if samples is None:
        number = options.num_workers
        if number is None:
            number = worker_count(procs=options.procs_on_cores or options.procs_on_node)
        if options.logs:
            how = f"loaded by {number} worker process(es)" if number else "loaded in this process"
            _log.info("data: %s is %s", split, how)
        return LoadedBatches(
            dataset, split=split, seed=seed, device=device, num_workers=number, collate_fn=options.collate_fn
        )

    if samples.device == device or samples.size_bytes <= device_limit(device, procs=options.procs_on_device):
        samples = samples.to(device)
    if options.logs:
        size = format_bytes(samples.size_bytes)
        _log.info("data: %s is resident in the memory of %s (%s)", split, samples.device, size)
    listeners = EpochListeners(dataset, split=split, seed=seed)
    return ResidentBatches(samples, device=device, seed=seed, listeners=listeners)


def _resident_samples(dataset: MapDataset, *, split: str, options: LoaderOptions) -> TensorSamples | None:
    """Return the samples as rows of tensors to keep in memory; None if a DataLoader is to load them."""
    if options.kind == "dataloader" or options.collate_fn is not None:
        return None
    if options.kind == "auto" and options.num_workers:
        return None
    samples = as_tensor_samples(dataset)
    if samples is not None or options.kind == "auto":
        return samples
    available = available_memory()
    if available is not None:
        available //= options.procs_on_node
    return decode(dataset, split=split, limit_bytes=available)


def worker_count(*, procs: int) -> int:
    """Return the loader processes for one of `procs` on the same cores: its share minus one, at most 8."""
    return min(MAX_WORKERS, threads_per_process(procs) - 1)


def device_limit(device: torch.device, *, procs: int) -> int:
    """Return the bytes that one of `procs` processes may still keep on an accelerator; 0 if it doesn't say, as `mps`.

    Call it before there is a model: what this process has on the device then is data, and counts.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    free_bytes, _ = module.mem_get_info(device)
    share_bytes = int((free_bytes + module.memory_reserved(device)) * DEVICE_SHARE) // procs
    return max(0, share_bytes - int(module.memory_allocated(device)))


# The loaders


@final
class MapLoader:
    """This rank's part of every global batch of a map-style dataset.

    All ranks make one with the same arguments except rank and device.

    split: `train`, `val` or `test`, for messages. sampler: in place of `shuffle`. limit: batches of each process per
    epoch at most, or a share of them. accumulated: batches of a process in a step. Raises DataError if the dataset is
    empty.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        split: str,
        plan: BatchPlan,
        rank: int,
        device: torch.device,
        options: LoaderOptions = IN_THIS_PROCESS,
        seed: int = 0,
        shuffle: bool = False,
        sampler: Sampler | None = None,
        limit: int | float | None = None,
        accumulated: int = 1,
    ) -> None:
        num_samples = dataset_size(dataset, split=split)
        self.collates = options.collate_fn is not None
        """True if a collate function of the user's makes the batches: it may drop samples."""
        self.dataset_epoch: int | None = None
        """The epoch that `set_epoch` of the dataset gets in an evaluation; None: the epoch that is loaded."""
        self.dataset = dataset
        self._split = split
        self._rank = rank
        self._order = GlobalOrder(num_samples, seed, shuffle, sampler=sampler)
        self.lists: BatchLists | None = None
        """The batch sampler of the user's that lists the global batches, if there is one."""
        if isinstance(sampler, BatchLists):
            self.lists = sampler
        self.sizes = self._order.sizes
        """Samples of each epoch, regardless of a limit."""
        self._sampler_listeners = EpochListeners(sampler, split=split, seed=seed, besides=(dataset, options.collate_fn))
        self._source = batch_source(dataset, split=split, seed=seed, device=device, options=options)

        rows = as_tensor_samples(dataset)
        sketch = None if rows is None else sketch_rows(rows)
        self._identity = DataIdentity(num_samples, sketch=sketch)
        # The identity in the checkpoint that is resumed, until it is compared.
        self._saved_identity: DataIdentity | None = None
        self._is_checked = False
        # The order of the epoch that was begun last.
        self._whole_order: Order | None = None
        self._set_steps(EpochSteps(self.sizes, plan, limit, accumulated))

    def _set_steps(self, steps: EpochSteps) -> None:
        self.steps = steps
        """The optimizer steps of each epoch."""
        self._plan = steps.plan
        self.global_batch_size = steps.plan.global_batch_size
        if steps.constant == 0:
            raise DataError(
                f"data.drop_last=true leaves nothing of the {self._split} part: it has {self.sizes.constant} "
                f"samples, and a global batch takes {self.global_batch_size}.\nUse a smaller data.batch_size (or "
                "data.global_batch_size), or data.drop_last=false."
            )

    def replanned(self, plan: BatchPlan, *, limit: int | None = None) -> MapLoader:
        """Return a loader of the same data with another plan and limit. For a loader without a limit of its own.

        Use one of the two at a time; closing either closes both.
        """
        other = copy.copy(self)
        other._set_steps(EpochSteps(self.sizes, plan, limit))
        return other

    @property
    def plan(self) -> BatchPlan:
        """How a global batch is split."""
        return self._plan

    @property
    def whole(self) -> Batch | None:
        """All rows in memory as a batch, maybe more than are trained on; None unless they are resident.

        A tensor that a transform may change stands in it as None.
        """
        if not isinstance(self._source, ResidentBatches):
            return None
        samples = self._source.samples
        transform = samples.transform
        if transform is None:
            return samples.pack(list(samples.tensors))
        if not isinstance(transform, Each):
            return None
        known = [None if transform.changes(i) else tensor for i, tensor in enumerate(samples.tensors)]
        return samples.pack(known)

    def epoch(
        self, epoch: int, start: int = 0, *, limit: int | None = None, skips: EpochSkips = NO_SKIPS
    ) -> Iterator[Window]:
        """Yield the windows of `epoch` from sample `start` of its order on; samples before it are not loaded.

        Take all micro-batches of a window before the next window, and end one epoch before another is begun.
        Raises DataError if `start` isn't inside the epoch, RunError if a sample can't be loaded, CheckpointError if the
        data isn't that of the checkpoint.

        Args:
            limit: global batches of the epoch at most; None: the loader's own limit.
            skips: what to pass over; samples that are left out are not loaded.
        """
        if limit is None:
            limit = self.steps.of(epoch)
        dataset_epoch = epoch
        if self.dataset_epoch is not None:
            dataset_epoch = self.dataset_epoch
        self._source.set_epoch(dataset_epoch)
        self._sampler_listeners.set_epoch(dataset_epoch)

        if self.lists is not None:
            yield from self._listed(
                self.lists, epoch, start=start, limit=limit, dataset_epoch=dataset_epoch, skips=skips
            )
            return
        positions = epoch_positions(
            self.sizes.of(epoch), self._plan, start=start, limit=limit, may_be_over=bool(skips.late)
        )
        order = self._order.indices(epoch, batch_size=self._plan.global_batch_size)
        self._whole_order = order
        if not skips:
            self._check_once(order, positions)
            yield from self._in_order(order, positions, epoch=epoch, dataset_epoch=dataset_epoch)
            return
        for part in parts_of_positions(positions, self.global_batch_size, skips):
            begin, end = part.positions
            if begin == end:
                self._check_order(order)
                yield end_without_step(part.passed)
                return
            self._check_once(order, slice(begin, end))
            yield from part.marked(self._in_order(order, slice(begin, end), epoch=epoch, dataset_epoch=dataset_epoch))

    def indices_at(self, span: Span) -> Tensor:
        """Return the dataset's indices of samples by their positions in the order of the epoch that was begun last."""
        assert self._whole_order is not None
        return self._whole_order[span.begin : span.end]

    def _in_order(self, order: Order, positions: slice, *, epoch: int, dataset_epoch: int) -> Iterator[Window]:
        """Yield the windows of the samples at these positions of the epoch's order."""
        if isinstance(self._source, ResidentBatches):
            gathered = yield from self._source.windows(order, positions, self._plan, rank=self._rank, epoch=epoch)
            positions = slice(positions.start + gathered, positions.stop)
        yield from self._loaded(order, positions, epoch=epoch, dataset_epoch=dataset_epoch)

    def _loaded(self, order: Order, positions: slice, *, epoch: int, dataset_epoch: int) -> Iterator[Window]:
        """Yield windows whose batches are loaded one by one. positions: those of the epoch's order to load."""
        rank_windows = windows(order, self._plan, rank=self._rank, start=positions.start, end=positions.stop)
        yield from self._loaded_windows(rank_windows, epoch=epoch, dataset_epoch=dataset_epoch)

    def _listed(
        self, lists: BatchLists, epoch: int, *, start: int, limit: int, dataset_epoch: int, skips: EpochSkips
    ) -> Iterator[Window]:
        """Yield the windows of listed batches. start: samples that were taken of the epoch."""
        order = self._order.listed(lists, epoch)
        self._whole_order = order.indices
        first = order.number_at(start)
        size = lists.nominal_size
        nominal = epoch_positions(len(lists), self._plan, start=first * size, limit=limit, may_be_over=bool(skips.late))
        numbers = range(first, nominal.stop // size)
        accumulated = self.steps.accumulated

        def begin_of(index: int) -> int:
            return order.begins[min(first + index * accumulated, numbers.stop)]

        for part in parts(math.ceil(len(numbers) / accumulated), begin_of, skips):
            begin, end = part.positions
            if begin == end:
                self._check_order(order.indices)
                yield end_without_step(part.passed)
                return
            self._check_once(order.indices, slice(begin, end))
            rank_windows = listed_windows(
                order,
                self._plan,
                rank=self._rank,
                accumulated=accumulated,
                numbers=range(order.number_at(begin), order.number_at(end)),
            )
            yield from part.marked(self._loaded_windows(rank_windows, epoch=epoch, dataset_epoch=dataset_epoch))

    def _loaded_windows(
        self, rank_windows: Iterator[WindowIndices], *, epoch: int, dataset_epoch: int
    ) -> Iterator[Window]:
        # Requests run ahead of the window that is yielded.
        rank_windows, requested = tee(rank_windows)
        batches = self._source.batches(_requests(requested, epoch=epoch, dataset_epoch=dataset_epoch))
        for window in rank_windows:
            # Loads nothing before it is asked to.
            micro_batches = (MicroBatch(next(batches), micro.num_samples) for micro in window.micro_batches)
            number = len(window.micro_batches)
            yield Window(
                micro_batches,
                number,
                window.global_count,
                window.epoch_end,
                window.micro_batches,
                sizes=window.sizes,
            )

    def _check_order(self, order: Order) -> None:
        """Compare with the order of the checkpoint in an epoch of which nothing is loaded."""
        if self._saved_identity is not None:
            check_order(self._saved_identity, order)
            self._saved_identity = None

    def _check_once(self, order: Order, positions: slice) -> None:
        if not self._is_checked:
            self._is_checked = True
            self._check_data(order, positions)

    def _check_data(self, order: Order, positions: slice) -> None:
        """Load some samples twice and warn if they differ. Raise CheckpointError if the data isn't the checkpoint's.

        Args:
            order: That of the whole epoch.
            positions: Of the samples that will be loaded of it.
        """
        saved = self._saved_identity
        self._saved_identity = None
        if saved is not None:
            check_order(saved, order)

        is_plain = isinstance(self._source, ResidentBatches) and self._source.samples.transform is None
        if not is_plain:
            if saved is not None and saved.indices:
                chosen = list(saved.indices)
            else:
                # Some more than are needed: a sampler may draw a sample several times.
                end = min(positions.stop, positions.start + NUM_SAMPLES**2)
                distinct = dict.fromkeys(order[positions.start : end].tolist())
                chosen = list(distinct)[:NUM_SAMPLES]
            checked = self._source.check(chosen)
            self._warn_of(checked)
            if checked.sketch is not None and self._identity.sketch is None:
                self._identity = replace(self._identity, indices=chosen, sketch=checked.sketch)

        if saved is not None:
            check_content(saved, self._identity)

    def _warn_of(self, checked: CheckedSamples) -> None:
        if checked.difference is not None:
            warn(
                f"The {self._split} dataset, a {_class_name(self.dataset)}, can't be repeated: {checked.difference} "
                "differs when it is loaded twice with the same random numbers. So a resumed run, or one with another "
                "number of workers, trains on other numbers. Draw from the generators of Python, NumPy or torch, or "
                "from one that is kept in an attribute"
            )
        if checked.collate_error is not None:
            warn(
                f"Whether the batches of the {self._split} dataset can be repeated was not checked, since its collate "
                f"function took no batch of {NUM_SAMPLES} samples. {checked.collate_error.splitlines()[0]}"
            )

    @property
    def identity(self) -> DataIdentity:
        """What a resumed run compares with its own data."""
        if self._whole_order is None:
            return self._identity
        return replace(self._identity, order=checksum_of(self._whole_order))

    def load_identity(self, saved: DataIdentity, *, samples: int) -> None:
        """Compare with the data of the checkpoint if it is in the middle of an epoch, after `samples` of it.

        Order and content are compared when the epoch is begun. Raises CheckpointError for data of another size.
        """
        if samples > 0:
            check_size(saved, size=self._identity.size)
            self._saved_identity = saved
        elif saved.size != self._identity.size:
            _log.info("the train dataset has %d samples now, and had %s", self._identity.size, saved.size)

    def state_dict(self) -> None:
        """Return nothing: the number of samples taken is all the state."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Nothing to load."""

    def observe_waiting(self, waiting: Waiting) -> None:
        """Report nothing: ranks don't wait for each other to load."""

    def close(self) -> None:
        """End the loader's worker processes; may be called again."""
        self._source.close()


TrainLoader = MapLoader | StreamLoader | SourceLoader
"""The loader of the train part."""


@final
class EvalLoader:
    """This rank's part of the data to evaluate: over all ranks every sample exactly once.

    Rank r of W takes batches r, r + W, … and its share of what is left at the end, unless it reads a shard of its own.
    Ranks may have different numbers of batches, or none. Random transforms draw the same numbers in every evaluation.
    With a stream, every rank must iterate.

    Args:
        loader: Yields windows with one micro-batch per rank, not shuffled.
        turns: Samples that a rank takes before it is the next rank's turn; None if each rank reads its own shard.
        is_even: Give ranks with fewer batches stand-ins without samples.
        tick: Called after each batch, to show progress.
    """

    def __init__(
        self,
        loader: MapLoader | StreamLoader,
        *,
        turns: int | None,
        is_even: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader = loader
        self._is_even = is_even
        self._tick = tick
        self.turns = turns

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that `set_epoch` of a map-style dataset gets: that of the weights that are evaluated.

        Parts of the data often share a dataset, as those of `random_split` do. For a stream an evaluation is epoch 0.
        """
        if isinstance(self._loader, MapLoader):
            self._loader.dataset_epoch = epoch

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.first(None)

    def first(self, number: int | None) -> Iterator[MicroBatch]:
        """Yield this rank's batches of the first `number` windows, None for all."""
        for window in self._loader.epoch(0, limit=number):
            for micro in window.micro_batches:
                if micro.num_samples or self._is_even:
                    yield micro
                    self._tick()

    def close(self) -> None:
        """End the loader's worker processes; may be called again."""
        self._loader.close()


def _requests(windows: Iterable[WindowIndices], *, epoch: int, dataset_epoch: int) -> Iterator[BatchRequest]:
    for window in windows:
        for micro, positions in zip(window.micro_batches, window.positions, strict=True):
            yield BatchRequest(micro.indices, positions, epoch, dataset_epoch)


def _class_name(dataset: Any) -> str:
    """Return the name of the class; for a Subset or ConcatDataset, with those of its parts."""
    name = type(dataset).__name__
    if isinstance(dataset, Subset):
        return f"{name} of {_class_name(dataset.dataset)}"
    parts = dict.fromkeys(_class_name(part) for part in getattr(dataset, "datasets", []))
    if parts:
        return f"{name} of {' and '.join(parts)}"
    return name


def dataset_size(dataset: MapDataset, *, split: str, processes: int = 1) -> int:
    """Return the number of samples. Raises DataError if there are none, or fewer than `processes`."""
    size = len(dataset)
    if size == 0:
        raise DataError(f"The {split} dataset is empty. Look at the keywords of data.datasets.")
    if size < processes:
        raise DataError(
            f"The {split} dataset has {size} samples for {processes} processes: some would never get one.\n"
            f"Use at most {size} processes (topology.procs_per_node), or more data."
        )
    return size
