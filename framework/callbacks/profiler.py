"""What some steps spend their time on: a summary of all ranks, and traces with every operator and kernel."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler
from torch.utils._pytree import tree_leaves

from framework.callbacks.time_shares import PhaseMark, Span, steps_seconds, time_shares, top_operators
from framework.distributed.collectives import gather_to_first
from framework.distributed.context import Context
from framework.distributed.storages import storages
from framework.system.rank_log import warn
from framework.system.run_dir import RunDir
from framework.types import Callback, FitInfo, StepInfo

_log = logging.getLogger("framework")

# An event whose time is known by `time.perf_counter`, too.
_CLOCK_EVENT = "framework: clocks"
# As torch calls an allocation, or a free of one, whose size is negative.
_MEMORY_EVENT = "[memory]"
_HOW_TO_BEGIN = "callbacks=[profiler] callbacks.profiler.wait=0 begins after two steps."


@final
class TorchProfiler(Callback):
    """torch.profiler over `active` optimizer steps.

    `run.json` gets a summary under `profile`, which the command prints at the end and `job=report` shows: the shares of
    computing, copies, exchange, waiting for data and idling on each rank, the operators that took most time, and the
    peak of the memory.

    Each rank writes `profile/rank_N.….pt.trace.json`, which Chrome (chrome://tracing), Perfetto and TensorBoard's
    profiler plugin open.

    Training that ends earlier keeps what was recorded until then; one that fails keeps its traces.

    Args:
        wait: Steps to skip first: those that allocate and compile.
        warmup: Steps with the profiler on whose record is dropped, since the first ones cost more.
        active: Steps to record.
        trace: Write the traces.
        record_shapes, profile_memory, with_stack: As for torch.profiler; each costs time. On a CPU, allocations are
            recorded in any case, for the peak of the memory.
    """

    def __init__(
        self,
        *,
        context: Context,
        run_dir: RunDir,
        wait: int = 10,
        warmup: int = 2,
        active: int = 5,
        trace: bool = True,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._folder = run_dir.path / "profile"
        self._context = context
        self._wait = wait
        self._steps_before = wait + warmup
        self._steps = wait + warmup + active
        self._writes_trace = trace
        self._is_on = False
        # The ends of the steps that are skipped.
        self._step_ends: list[float] = []
        # Of the steps that are recorded.
        self._marks: list[PhaseMark] = []
        self._begin_s = 0.0
        self._end_s = 0.0
        self._recorded_steps: list[int] = []
        # What is allocated when recording begins, as far as that is known.
        self._kept_bytes: int | None = None
        # Read when the first profile begins. Otherwise it prints that it found no GPU, and when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU]
        if context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._write_trace = tensorboard_trace_handler(str(self._folder), worker_name=f"rank_{context.rank}")
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._keep,
            record_shapes=record_shapes,
            # On a GPU, torch counts allocations anyway.
            profile_memory=profile_memory or context.device.type == "cpu",
            with_stack=with_stack,
        )

    def on_fit_start(self, info: FitInfo) -> None:
        self._start_step = info.start_step
        self._observe_phases = info.observe_phases
        self._model = info.model
        self._optimizer = info.optimizer
        if self._context.is_main:
            # Of this start: an earlier one may have left its own.
            self._run_dir.update_run({"profile": None})
        self._profile.start()
        self._is_on = True
        self._begin_recording_if_due(info.start_step)

    def on_train_step_end(self, info: StepInfo) -> None:
        if not self._is_on:
            return
        done = info.step - self._start_step
        if done <= self._wait:
            self._step_ends.append(time.perf_counter())
        elif done > self._steps_before:
            self._end_s = time.perf_counter()
            self._recorded_steps.append(info.step)
        self._profile.step()
        if done == self._steps:
            self.close()
        else:
            self._begin_recording_if_due(info.step)

    def on_fit_end(self) -> None:
        self.close()
        summary = None
        if self._recorded_steps:
            # Here, since it takes a minute for a million events.
            summary = self._summarize()
        elif self._context.is_main:
            first_step = self._start_step + self._steps_before + 1
            warn(f"The profiler recorded nothing: training ended before step {first_step}. {_HOW_TO_BEGIN}")
        summaries = gather_to_first(summary, self._context)
        if self._context.is_main and summary is not None:
            ranks = [of_rank["ranks"][0] for of_rank in summaries]
            self._run_dir.update_run({"profile": {**summary, "ranks": ranks}})

    def close(self) -> None:
        """Keep what was recorded, also by a failed training. May be called again; a full disk is only logged."""
        if not self._is_on:
            return
        self._is_on = False
        self._observe_phases(None)
        try:
            self._profile.stop()
        except (OSError, RuntimeError) as error:
            # Torch's handler raises RuntimeError. Raising here would hide the failure that ends the run.
            _log.warning("TorchProfiler can't write what it recorded: %s", error)

    def _begin_recording_if_due(self, step: int) -> None:
        """Note when the recorded steps begin, and from then on each of their phases."""
        if step - self._start_step != self._steps_before:
            return
        with record_function(_CLOCK_EVENT):
            self._begin_s = time.perf_counter()
        if self._context.device.type == "cpu" and self._context.world_size == 1:
            # With several ranks, DDP's buckets are out of sight.
            self._kept_bytes = self._state_bytes()
        self._mark("logging")
        self._observe_phases(self._mark)

    def _mark(self, name: str) -> None:
        self._marks.append(PhaseMark(name, time.perf_counter()))

    def _keep(self, recorded: profile) -> None:
        if not self._writes_trace:
            return
        # Torch's handler would make the run directory again, if that was moved away.
        self._folder.mkdir(exist_ok=True)
        self._write_trace(recorded)
        if self._context.is_main:
            print(f"Traces of the profiler are in {self._folder}", flush=True)

    def _summarize(self) -> dict[str, Any]:
        """Return what `run.json` keeps, with this rank as the only one."""
        events = self._profile.events()
        on_gpu = self._context.device.type == "cuda"
        window = Span(self._begin_s, self._end_s)
        marks = [mark for mark in self._marks if mark.begin_s < window.end_s]
        num_steps = len(self._recorded_steps)
        profiled_s = steps_seconds(marks, window) / num_steps
        (clock,) = (event for event in events if event.name == _CLOCK_EVENT)
        offset_s = window.begin_s - clock.time_range.start * 1e-6
        shares = time_shares(events, marks, window, offset_s=offset_s, on_gpu=on_gpu)

        operators = []
        for operator in top_operators(events, marks, window, offset_s=offset_s, on_gpu=on_gpu):
            share = operator.seconds / num_steps / profiled_s
            operators.append({**operator._asdict(), "share": share})
        return {
            "peak_bytes": self._peak_bytes(),
            "steps": [self._recorded_steps[0], self._recorded_steps[-1]],
            "step_s": self._unprofiled_step_s(),
            "profiled_step_s": profiled_s,
            "ranks": [shares],
            "operators": operators,
        }

    def _peak_bytes(self) -> int | None:
        """Return the most memory that was allocated, on a GPU by the process until now, else by the recorded steps.

        None if it isn't known.
        """
        device = self._context.device
        if device.type != "cpu":
            return torch.accelerator.max_memory_allocated(device)
        if self._kept_bytes is None:
            return None
        recorder = self._profile.profiler
        assert recorder is not None
        assert recorder.kineto_results is not None
        changes = []
        begin_ns = 0
        events: Iterable[Any] = recorder.kineto_results.events()
        for event in events:
            if event.name() == _CLOCK_EVENT:
                begin_ns = event.start_ns()
            elif event.name() == _MEMORY_EVENT and event.device_type() == DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        allocated = self._kept_bytes
        peak = allocated
        for at_ns, change in sorted(changes):
            if at_ns > begin_ns:
                allocated += change
                peak = max(peak, allocated)
        return peak

    def _state_bytes(self) -> int:
        """Return the memory of weights, buffers, gradients and the optimizer's state."""
        tensors: list[Tensor] = []
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            tensors.append(tensor)
            if tensor.grad is not None:
                tensors.append(tensor.grad)
        for state in self._optimizer.state.values():
            tensors += [value for value in tree_leaves(state) if isinstance(value, Tensor)]
        # A tied weight is there once.
        sizes = {}
        for tensor in tensors:
            for storage in storages(tensor):
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def _unprofiled_step_s(self) -> float | None:
        """Return how long a step takes without the profiler; None without enough steps before it.

        It is a median, so the slow first steps don't matter.
        """
        if len(self._step_ends) < 4:
            return None
        return median(end - begin for begin, end in pairwise(self._step_ends))
