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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from framework.data.batching import BatchPlan, micro_batches, plan_batches
from framework.data.loader import TrainLoader
from framework.data.stream import StreamLoader
from framework.distributed.collectives import barrier
from framework.distributed.process_group import new_gloo_group
from framework.errors import RunError, describe_error
from framework.strategies.base import Strategy
from framework.system.formatting import format_binary_bytes
from framework.system.hardware import available_memory
from framework.training.engine import build_trainer
from framework.training.rank_setup import RankSetup, loader_options
from framework.training.sizes import tensor_bytes
from framework.training.trainer import Trainer

_RESET_PEAK = "5"  # https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
)


def find_batch_size(
    rank: RankSetup, loader: TrainLoader, sizing: BatchSizing, *, averages: int
) -> tuple[int, dict[str, Any]]:
    """Return the largest size that fits, and what tune.json has of it. Raises RunError if one sample doesn't fit.

    averages: how many callbacks keep a copy of the model to evaluate.
    """
    settings, trials = rank.config.tune, Trials(rank, loader, sizing, averages=averages)
    memory, (most, limited_by) = trials.memory, sizing.most(settings.max_batch_size)
    if rank.context.is_main:
        room = "an unknown amount" if memory.room_bytes is None else format_binary_bytes(memory.room_bytes)
        print(f"Batches of 1 to {most:,}: {room} of memory for a process's steps", flush=True)
    # If a batch that is too large gets the process killed, start small and predict.
    size = largest_fitting(trials.fits, start=rank.config.data.batch_size if memory.is_limited else 2, most=most)
    if isinstance(memory, DeviceMemory):
        memory.remove_limit()
    if size is None:
        *_, last = trials.tried.values()
        raise RunError(
            f"Not even a batch of 1 fits: rank {last['refused_by']}: {last['refusal']}\n"
            "Use a smaller model, trainer.precision=bf16-mixed, trainer.activation_checkpointing=auto, or a strategy "
            "that shards the model: strategy=fsdp"
        )
    return size, {
        "batch_size": sizing.pass_size(size),
        "limited_by": limited_by if size == most else "memory",
        "margin": settings.margin,
        "room_bytes": memory.room_bytes,
        "trials": list(trials.tried.values()),
    }


# Which sizes to try


def resolution(size: int) -> int:
    """Return how finely sizes near `size` are searched: a sixteenth of the power of two below it, 1 below 32."""
    return max(1, (1 << (size.bit_length() - 1)) // 16)


def largest_fitting(fits: Callable[[int], bool], *, start: int, most: int) -> int | None:
    """Return the largest size from 1 to `most` for which `fits`, to within `resolution`; None if 1 doesn't fit.

    Doubles from `start`, or halves if that is too large, then halves the interval. No size is tried twice. Every rank
    must call it with the same numbers, and `fits` must return the same on all.
    """
    fitting, failing = 0, most + 1
    size = min(start, most)
    while True:
        if fits(size):
            fitting = size
        else:
            failing = size
        if fitting == most or failing == 1:
            return fitting or None
        if fitting == 0:
            size = failing // 2
        elif failing > most:
            size = min(2 * fitting, most)
        else:
            step = resolution(fitting)
            if failing - fitting <= step:
                return fitting
            size = (fitting + failing) // 2 // step * step
            size += step if size <= fitting else 0


@dataclass(frozen=True)
class BatchSizing:
    """Plans steps for any batch size; the number of processes, and accumulation or the global batch, stay."""

    world_size: int
    accumulate: int  # forward passes per step, unless there is a global batch
    global_batch_size: int | None
    samples: int  # in the dataset

    def most(self, limit: int | None) -> tuple[int, str]:
        """Return the largest sensible batch of one pass, and what limits it: a key, or "data"."""
        if self.global_batch_size is not None:
            most = self._share
            by = "data.global_batch_size" if self.global_batch_size <= self.samples else "data"
        else:
            most, by = max(1, self.samples // (self.world_size * self.accumulate)), "data"
        return (limit, "tune.max_batch_size") if limit is not None and limit < most else (most, by)

    def passes(self, size: int) -> int:
        """Return the trainer.accumulate_grad_batches with which no pass has more than `size` samples.

        If the global batch is larger than the dataset, steps have fewer passes, each as large as in a full step.
        """
        if self.global_batch_size is None:
            return self.accumulate
        full, needed = -(-self.global_batch_size // self.world_size), -(-self._share // size)
        # The smallest p for which `micro_batches` cuts the share into ceil(share * p / full) >= needed passes.
        return full * (needed - 1) // self._share + 1

    def pass_size(self, size: int) -> int:
        """Return the samples of the largest pass if at most `size` fit: a global batch is split evenly."""
        if self.global_batch_size is None:
            return size
        return -(-self._share // -(-self._share // size))

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

    def full_steps(self, plan: BatchPlan) -> int:
        """Return the steps of an epoch without a short last one; at least one."""
        return max(1, self.samples // plan.global_batch_size)

    def largest_step(self, plan: BatchPlan) -> tuple[int, int]:
        """Return samples and passes of the largest step that the dataset allows."""
        samples = min(plan.global_batch_size, self.samples)
        return samples, len(micro_batches(plan, global_count=samples, rank=0))

    def overrides(self, size: int) -> dict[str, float]:
        """Return the key to set for `size`, and its value."""
        if self.global_batch_size is None:
            return {"data.batch_size": size}
        return {"trainer.accumulate_grad_batches": self.passes(size)}

    @property
    def _share(self) -> int:
        """The most samples of a global batch that one process gets."""
        return -(-min(self.global_batch_size or self.samples, self.samples) // self.world_size)


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

    is_limited = False

    def __init__(self, *, sharing: int, margin: float, root: Path = Path("/")) -> None:
        """sharing: processes of this node. margin: share of the free memory that stays free."""
        self._folder = root / "proc/self"
        _free()
        self._before = self._status("VmRSS")
        available = None if self._before is None else available_memory(root)
        self.room_bytes = None if available is None else int(available * (1 - margin)) // sharing

    def clear(self) -> None:
        """Return free memory to the system, and measure the peak from here on."""
        _free()
        with suppress(OSError):  # then it is the peak of the whole process: too high rather than too low
            (self._folder / "clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int | None:
        """Return the most that was taken since `clear`, beyond what was taken at first; None if it isn't known."""
        peak = self._status("VmHWM")
        return None if peak is None or self._before is None else max(0, peak - self._before)

    def _status(self, name: str) -> int | None:
        with suppress(OSError):
            found = re.search(rf"^{name}:\s*(\d+) kB", (self._folder / "status").read_text(), re.MULTILINE)
            return None if found is None else int(found[1]) * 1024
        return None


@final
class DeviceMemory:
    """A share of the free memory of a process's devices, beyond which torch's allocator raises an error.

    Nothing is known of devices that don't report their memory, such as `mps`: there the device itself is the limit.
    """

    is_limited = True

    def __init__(self, devices: Sequence[torch.device], *, sharing: int, margin: float) -> None:
        """sharing: processes that use the same device."""
        self._module: Any = torch.get_device_module(devices[0])
        self._devices = list(dict.fromkeys(devices)) if hasattr(self._module, "set_per_process_memory_fraction") else []
        self.room_bytes: int | None = None
        self.clear()
        for device in self._devices:
            free, total = self._module.mem_get_info(device)
            room = int(free * (1 - margin)) // sharing
            self.room_bytes = (self.room_bytes or 0) + room
            fraction = min(1.0, (room + self._module.memory_reserved(device)) / total)
            self._module.set_per_process_memory_fraction(fraction, device)
        self._before = sum(int(self._module.memory_allocated(device)) for device in self._devices)

    def clear(self) -> None:
        _free()
        torch.accelerator.empty_cache()
        for device in self._devices:
            self._module.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        if not self._devices:
            return None
        return max(0, sum(int(self._module.max_memory_allocated(device)) for device in self._devices) - self._before)

    def remove_limit(self) -> None:
        for device in self._devices:
            self._module.set_per_process_memory_fraction(1.0, device)


def _free() -> None:
    """Return unused memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def reserved_bytes(model: nn.Module, *, gradients: int, models: int) -> dict[torch.device, int]:
    """Return the bytes per device of `gradients` copies of all gradients and `models` copies of the model."""
    found: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copies = models + (gradients if tensor.requires_grad else 0)
        found[tensor.device] = found.get(tensor.device, 0) + copies * tensor_bytes([tensor])
    return found


def train_steps(trainer: Trainer, loader: TrainLoader | StreamLoader, num_steps: int) -> Iterator[float]:
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

    def __init__(self, rank: RankSetup, loader: TrainLoader, sizing: BatchSizing, *, averages: int) -> None:
        """Every rank must make one. averages: see `find_batch_size`."""
        self._context, self._loader, self._sizing = rank.context, loader, sizing
        self._steps, margin, backend = rank.config.tune.steps_per_trial, rank.config.tune.margin, rank.config.backend
        self._peaks: dict[int, int] = {}  # bytes of what fitted, by samples
        self.tried: dict[int, dict[str, Any]] = {}  # as tune.json has them, by samples
        self._trainer = build_trainer(replace(rank, strategy=Strategy()), loader, None)
        for param_group in self._trainer.state.optimizer.param_groups:
            param_group["lr"] = 0.0
        self._group = None  # to exchange outcomes over the CPU
        if self._context.world_size > 1:  # counted: a rank that hangs in a trial is the one that the others wait for
            self._group = new_gloo_group(max(backend.init_timeout, backend.timeout), is_monitored=True)
        # Gradients that are exchanged are copied; some strategies keep copies of weights.
        gradients = int(self._context.world_size > 1) + rank.strategy.weight_copies
        self._reserved = reserved_bytes(self._trainer.state.bare_model, gradients=gradients, models=averages)
        barrier(self._context)  # all processes of a node measure what is free before one of them takes it
        if self._context.device.type == "cpu":
            self.memory = HostMemory(sharing=self._context.topology.procs_per_node, margin=margin)
        else:
            sharing = loader_options(rank).procs_on_device
            self.memory = DeviceMemory(self._context.devices, sharing=sharing, margin=margin)
        barrier(self._context)

    def fits(self, size: int) -> bool:
        """Return True if a pass of `size` samples fits on every rank. Every rank must call it.

        Passes errors that aren't about memory.
        """
        size = self._sizing.pass_size(size)
        if size in self.tried:  # several sizes split a global batch in the same way
            return bool(self.tried[size]["fits"])
        outcomes: list[Any] = [self._try(size)]
        if self._group is not None:
            own, outcomes = outcomes[0], [None] * self._context.world_size
            dist.all_gather_object(outcomes, own, group=self._group)
        refusals, peaks, times_s = zip(*outcomes, strict=True)
        refused_by = next((rank for rank, refusal in enumerate(refusals) if refusal is not None), None)
        samples, _ = self._sizing.largest_step(self._sizing.trial(size))
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
        expected, limit = self._predict(size), self.memory.room_bytes
        if expected is not None and limit is not None and expected > limit:
            return f"would take about {format_binary_bytes(expected)} of {format_binary_bytes(limit)}", None, None
        return self._measure(size)

    def _measure(self, size: int) -> tuple[str | None, int | None, float | None]:
        self.memory.clear()
        refusal, step_s = self._make_steps(size)
        peak, limit = self.memory.peak_bytes(), self.memory.room_bytes
        self.memory.clear()  # at once: other processes of this machine may still make their steps
        if refusal is None and peak is not None:
            if limit is not None and peak > limit:
                refusal = f"took {format_binary_bytes(peak)} of {format_binary_bytes(limit)}"
            else:
                self._peaks[size] = peak
        return refusal, peak, step_s

    def _make_steps(self, size: int) -> tuple[str | None, float | None]:
        """Return why it doesn't fit, and the seconds of the fastest step; on return its memory is free."""
        plan = self._sizing.trial(size)
        loader = self._loader.replanned(plan, limit=self._sizing.full_steps(plan))
        times_s: list[float] = []
        try:
            reserved = [torch.ones(n, dtype=torch.uint8, device=device) for device, n in self._reserved.items()]
            for step_s in train_steps(self._trainer, loader, self._steps):
                if not times_s:  # the first step loads kernels and compiles
                    self.memory.clear()
                times_s.append(step_s)
            del reserved
        except Exception as error:  # of the user's code, too
            if not is_out_of_memory(error):
                raise
            return describe_error(error), None
        finally:
            self._trainer.state.optimizer.zero_grad(set_to_none=True)
        return None, min(times_s[1:])

    def _predict(self, size: int) -> int | None:
        """Return the peak to expect, from a line through the two largest sizes that fitted; None if it may be tried.

        One trial can't tell what grows with the samples from what doesn't. If the size wouldn't fit should all of it
        grow, a batch of one sample more is measured first.
        """
        limit = self.memory.room_bytes
        if self.memory.is_limited or limit is None or not self._peaks or size <= max(self._peaks):
            return None
        (first, peak), *others = self._peaks.items()
        another = self._sizing.pass_size(first + 1)
        if not others and peak * size // first > limit and another not in (first, size):
            self._measure(another)
        (size_before, before), (size_last, last) = sorted({0: 0, **self._peaks}.items())[-2:]
        return last + int(max(last - before, 0) / (size_last - size_before) * (size - size_last))


def _line(trial: Mapping[str, Any]) -> str:
    peak = "" if trial["peak_bytes"] is None else format_binary_bytes(trial["peak_bytes"])
    if trial["fits"]:
        return f"  batch {trial['batch_size']:<8,} fits         {peak:>10}  {trial['samples_per_s']:,.0f} samples/s"
    text = trial["refusal"]
    shown = text if len(text) <= 90 else f"{text[:89]}…"
    return f"  batch {trial['batch_size']:<8,} doesn't fit  rank {trial['refused_by']}: {shown}"
