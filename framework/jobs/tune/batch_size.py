"""Find the largest batch that fits on every rank: which sizes to try, the memory that steps take and may take, trials.

A rank that runs out of memory in the middle of a step would leave the others waiting in the exchange of gradients. So
a trial's model isn't wrapped by a strategy, and the ranks exchange only the outcome. The memory that the strategy needs
on top is allocated meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from textwrap import shorten
from typing import Any, final

import torch
from torch import Tensor

from framework.data.batching import BatchPlan, plan_batches
from framework.data.loader import MapLoader
from framework.data.stream import StreamLoader
from framework.distributed.collectives import barrier
from framework.engine.build_trainer import build_trainer
from framework.engine.setup import RankSetup
from framework.engine.state_bytes import average_dtype
from framework.errors import RunError, describe_error
from framework.strategies.base import Strategy
from framework.system.formatting import format_binary_bytes
from framework.system.hardware import available_memory
from framework.training.trainer import Trainer

_RESET_PEAK = "5"  # https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
_OUT_OF_MEMORY = re.compile(r"out of memory|(can't allocate|not enough) memory|std::bad_alloc|_STATUS_ALLOC_FAILED")


def find_batch_size(
    setup: RankSetup, loader: MapLoader, *, averages: int
) -> tuple[BatchPlan, dict[str, Any], dict[str, float]]:
    """Return the plan with the largest batch that fits, its entry in `tune.json`, and the overrides that select it.

    Every rank must call it. Raises RunError if one sample doesn't fit, ConfigError if the global batch can't be split
    as finely as needed. averages: how many callbacks keep a copy of the model to evaluate.
    """
    config = setup.config
    settings = setup.config.tune
    sizing = BatchSizing(
        setup.data_share.world_size,
        config.trainer.accumulate_grad_batches,
        config.data.global_batch_size,
        samples=loader.size,
    )
    trials = Trials(setup, loader, sizing, averages=averages)
    memory = trials.memory
    most, limited_by = sizing.most(settings.max_batch_size)
    if setup.context.is_main:
        room = "an unknown amount" if memory.room_bytes is None else format_binary_bytes(memory.room_bytes)
        print(f"Batches of 1 to {most:,}: {room} of memory for a process's steps", flush=True)
    # A batch too large for the host would get the process killed: start small and predict.
    start = 2 if isinstance(memory, HostMemory) else config.data.train_batch_size
    size = largest_fitting(trials.fits, start=start, most=most)
    if size == 0:
        raise RunError(
            f"Not even a batch of 1 fits: rank {trials.tried[1]['refused_by']}: {trials.tried[1]['refusal']}\n"
            "Use a smaller model, trainer.precision=bf16-mixed, trainer.activation_checkpointing=auto, or a strategy "
            "that shards the model: strategy=fsdp"
        )
    plan = sizing.plan(size)
    found = {
        "batch_size": sizing.pass_size(size),
        "limited_by": limited_by if size == most else "memory",
        "margin": settings.margin,
        "room_bytes": memory.room_bytes,
        "global_batch_size": plan.global_batch_size,
        "accumulate_grad_batches": plan.micro_batches,
        "trials": list(trials.tried.values()),
    }
    return plan, found, sizing.overrides(size)


# Which sizes to try


def resolution(size: int) -> int:
    """Return how finely sizes near `size` are searched: a sixteenth of the power of two below it, 1 below 32."""
    return 1 << max(0, size.bit_length() - 5)


def largest_fitting(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """Return the largest size from 1 to `most` for which `fits`, to within `resolution`; 0 if 1 doesn't fit.

    Doubles from `start`, or halves if that is too large, then bisects the interval. No size is tried twice. Every rank
    must call it with the same numbers, and `fits` must return the same on all.
    """
    fitting = 0
    failing = most + 1
    size = min(start, most)
    while fitting < size < failing:
        if fits(size):
            fitting = size
            size = min(2 * size, most)
        else:
            failing = size
            size //= 2
    step = resolution(fitting)
    # Of these, the ones that fit come first: about log2 of them are tried.
    candidates = range(fitting // step * step + step, failing, step)
    num_fitting = bisect_left(candidates, True, key=lambda candidate: not fits(candidate))
    return candidates[num_fitting - 1] if num_fitting else fitting


@dataclass(frozen=True)
class BatchSizing:
    """Plans steps for any batch size; the number of processes, and accumulation or the global batch, stay."""

    world_size: int
    # Forward passes per step, unless there is a global batch.
    accumulate: int
    global_batch_size: int | None
    # In the dataset.
    samples: int

    def most(self, limit: int | None) -> tuple[int, str]:
        """Return the largest sensible batch of one pass, and what limits it: a key, or "data"."""
        if self.global_batch_size is None:
            sizes = {"data": max(1, self.samples // (self.world_size * self.accumulate))}
        else:
            sizes = {"data.global_batch_size": self._share, "data": -(-self.samples // self.world_size)}
        if limit is not None:
            sizes["tune.max_batch_size"] = limit
        by = min(sizes, key=sizes.__getitem__)
        return sizes[by], by

    def passes(self, size: int) -> int:
        """Return the trainer.accumulate_grad_batches with which no pass has more than `size` samples."""
        return self.accumulate if self.global_batch_size is None else -(-self._share // size)

    def pass_size(self, size: int) -> int:
        """Return the samples of the largest pass if at most `size` fit: a global batch is split evenly."""
        return size if self.global_batch_size is None else -(-self._share // self.passes(size))

    def trial(self, size: int) -> BatchPlan:
        """Return a step to try `size` with. Two passes need as much memory as any larger number."""
        passes = min(self.passes(size), 2)
        return BatchPlan(self.pass_size(size) * self.world_size * passes, passes, self.world_size)

    def plan(self, size: int) -> BatchPlan:
        """Return the run's steps with `size`. Raises ConfigError if the global batch can't be split so finely."""
        return plan_batches(
            batch_size=size,
            global_batch_size=self.global_batch_size,
            world_size=self.world_size,
            accumulate=self.passes(size),
        )

    def overrides(self, size: int) -> dict[str, float]:
        """Return the key to set for `size`, and its value."""
        if self.global_batch_size is None:
            return {"data.batch_size": size}
        return {"trainer.accumulate_grad_batches": self.passes(size)}

    @property
    def _share(self) -> int:
        """The most samples of a global batch that one process gets."""
        return -(-(self.global_batch_size or 1) // self.world_size)


# Memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error or a cause of it is an out-of-memory error: torch's, Python's, or an allocator's."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


@final
class HostMemory:
    """This process's share of what the host, or its control group, has left. Nothing is known except on Linux.

    A batch that is too large can't be tried here: the system would kill a process, seldom the one that asked for the
    memory. So the peaks of smaller ones are measured.
    """

    def __init__(self, *, sharing: int, margin: float, root: Path = Path("/")) -> None:
        """sharing: processes of this node. margin: share of the free memory that stays free."""
        self._folder = root / "proc/self"
        self.clear()
        self._before = self._status("VmRSS")
        available = available_memory(root)
        self.room_bytes = None if available is None else int(available * (1 - margin)) // sharing

    def clear(self) -> None:
        """Return free memory to the system, and measure the peak from here on."""
        gc.collect()
        # Another C library may not have it.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # If it is refused, the peak is that of the whole process: too high rather than too low.
        with suppress(OSError):
            (self._folder / "clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int | None:
        """Return the most that was taken since `clear`, beyond what was taken at first; None if it isn't known."""
        peak = self._status("VmHWM")
        if peak is None or self._before is None:
            return None
        return max(0, peak - self._before)

    def _status(self, name: str) -> int | None:
        """Return a line of the process's status, in bytes; None if it isn't known."""
        try:
            text = (self._folder / "status").read_text()
        except OSError:
            return None
        match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
        return None if match is None else int(match[1]) * 1024


@final
class DeviceMemory:
    """This process's share of the free memory of its devices, as torch's allocator takes it.

    Nothing is known of devices that don't report their memory, such as `mps`: there the device itself is the limit.
    """

    def __init__(self, devices: Sequence[torch.device], *, sharing: int, margin: float) -> None:
        """sharing: processes that use the same device. margin: share of the free memory that stays free."""
        reports = hasattr(torch.get_device_module(devices[0]), "mem_get_info")
        self._devices = list(dict.fromkeys(devices)) if reports else []
        self.clear()
        self.room_bytes = None
        if self._devices:
            free_bytes = sum(torch.accelerator.get_memory_info(device)[0] for device in self._devices)
            self.room_bytes = int(free_bytes * (1 - margin)) // sharing
        self._before = sum(map(torch.accelerator.memory_allocated, self._devices))

    def clear(self) -> None:
        """Return free memory to the devices, and measure the peak from here on."""
        gc.collect()
        torch.accelerator.empty_cache()
        for device in self._devices:
            torch.accelerator.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        """Return the most that was taken since `clear`, beyond what was taken at first; None if it isn't known."""
        if not self._devices:
            return None
        taken = sum(map(torch.accelerator.max_memory_allocated, self._devices))
        return max(0, taken - self._before)


def full_steps(loader: MapLoader, plan: BatchPlan) -> MapLoader:
    """Return a loader of steps as planned, without a short one at the end of an epoch; at least one."""
    return loader.replanned(plan, limit=max(1, loader.size // plan.global_batch_size))


def train_steps(trainer: Trainer, loader: MapLoader | StreamLoader, num_steps: int) -> Iterator[float]:
    """Train `num_steps` steps, over as many epochs as that takes, and yield the seconds of each."""
    windows = (window for epoch in count() for window in loader.epoch(epoch))
    for window in islice(windows, num_steps):
        began = time.perf_counter()
        trainer.train_step(window)
        trainer.context.wait_for_devices()
        yield time.perf_counter() - began


# Trials


@final
class Trials:
    """Tries batch sizes on all ranks, each by itself. Weights don't change, since the learning rate is set to 0."""

    memory: HostMemory | DeviceMemory

    def __init__(self, setup: RankSetup, loader: MapLoader, sizing: BatchSizing, *, averages: int) -> None:
        """Every rank must make one. averages: see `find_batch_size`."""
        self._context = setup.context
        self._loader = loader
        self._sizing = sizing
        self._steps = setup.config.tune.steps_per_trial
        # The trials as tune.json has them, by samples.
        self.tried: dict[int, dict[str, Any]] = {}
        self._trainer = build_trainer(replace(setup, strategy=Strategy()), loader, {})
        self._trainer.weight_alone()
        for param_group in self._trainer.state.optimizer.param_groups:
            param_group["lr"] = 0.0
        # It goes over the CPU.
        self._exchange = setup.exchange
        self._exchange.open()
        # Gradients that are exchanged are copied; some strategies keep copies of weights.
        gradients = int(self._context.world_size > 1) + setup.strategy.costs().weight_copies
        model = self._trainer.state.bare_model
        self._copies = []
        for tensor in (*model.parameters(), *model.buffers()):
            # Averages of bfloat16 are float32.
            widened = average_dtype(tensor).itemsize // tensor.itemsize
            self._copies.append((tensor, averages * widened + gradients * tensor.requires_grad))
        # All processes of a node measure what is free before one of them takes it.
        margin = setup.config.tune.margin
        barrier(self._context)
        if self._context.device.type == "cpu":
            self.memory = HostMemory(sharing=self._context.topology.procs_per_node, margin=margin)
        else:
            sharing = self._context.topology.procs_per_gpu
            self.memory = DeviceMemory(self._context.devices, sharing=sharing, margin=margin)
        barrier(self._context)

    def fits(self, size: int) -> bool:
        """Return True if a pass of `size` samples fits on every rank. Every rank must call it.

        Passes errors that aren't about memory.
        """
        size = self._sizing.pass_size(size)
        # Several sizes split a global batch in the same way.
        if size in self.tried:
            return bool(self.tried[size]["fits"])
        own = self._try(size)
        outcomes = [self._exchange.broadcast(own, source=rank) for rank in range(self._context.world_size)]
        refusals, peaks, times_s = zip(*outcomes, strict=True)
        refused_by = next((rank for rank, refusal in enumerate(refusals) if refusal is not None), None)
        samples = min(self._sizing.trial(size).global_batch_size, self._sizing.samples)
        self.tried[size] = {
            "batch_size": size,
            "fits": refused_by is None,
            "refused_by": refused_by,
            "refusal": None if refused_by is None else refusals[refused_by],
            "peak_bytes": max((peak for peak in peaks if peak is not None), default=None),
            "samples_per_s": samples / max(times_s) if refused_by is None else None,
        }
        if self._context.is_main:
            print(_line(self.tried[size]), flush=True)
        return refused_by is None

    def _try(self, size: int) -> tuple[str | None, int | None, float | None]:
        """Return why the size doesn't fit on this rank, the peak in bytes, and the seconds of the fastest step."""
        expected = self._expected_bytes(size)
        room = self.memory.room_bytes
        if room is not None and expected > room:
            return f"would take about {format_binary_bytes(expected)} of {format_binary_bytes(room)}", None, None
        self.memory.clear()
        refusal, step_s = self._make_steps(size)
        peak = self.memory.peak_bytes()
        # At once: other processes of this machine may still make their steps.
        self.memory.clear()
        if refusal is None and peak is not None and room is not None and peak > room:
            refusal = f"took {format_binary_bytes(peak)} of {format_binary_bytes(room)}"
        return refusal, peak, step_s

    def _make_steps(self, size: int) -> tuple[str | None, float | None]:
        """Return why it doesn't fit, and the seconds of the fastest step; on return its memory is free."""
        loader = full_steps(self._loader, self._sizing.trial(size))
        times_s: list[float] = []
        try:
            reserved = []
            for tensor, copies in self._copies:
                reserved += [torch.ones_like(tensor) for _ in range(copies)]
            for step_s in train_steps(self._trainer, loader, self._steps):
                # The first step loads kernels and compiles.
                if not times_s:
                    self.memory.clear()
                times_s.append(step_s)
            del reserved
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return describe_error(error), None
        finally:
            self._trainer.state.optimizer.zero_grad(set_to_none=True)
        return None, min(times_s[1:])

    def _expected_bytes(self, size: int) -> int:
        """Return the peak to expect in the host's memory: from a line through the two largest sizes that fitted.

        The first size is compared with what the weights take without any sample. 0 if the size may be tried.
        """
        peaks = sorted((samples, trial["peak_bytes"]) for samples, trial in self.tried.items() if trial["fits"])
        if isinstance(self.memory, DeviceMemory) or not peaks or peaks[-1][1] is None:
            return 0
        fixed_bytes = 0
        for state in self._trainer.state.optimizer.state.values():
            fixed_bytes += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        for tensor, copies in self._copies:
            fixed_bytes += (copies + tensor.requires_grad) * tensor.nbytes
        (size_before, before), (size_last, last) = [(0, fixed_bytes), *peaks][-2:]
        bytes_per_sample = max(last - before, 0) / (size_last - size_before)
        return int(last + bytes_per_sample * (size - size_last))


def _line(trial: Mapping[str, Any]) -> str:
    peak = "" if trial["peak_bytes"] is None else format_binary_bytes(trial["peak_bytes"])
    if trial["fits"]:
        return f"  batch {trial['batch_size']:<8,} fits         {peak:>10}  {trial['samples_per_s']:,.0f} samples/s"
    refusal = shorten(trial["refusal"], 90, placeholder="…")
    return f"  batch {trial['batch_size']:<8,} doesn't fit  rank {trial['refused_by']}: {refusal}"
