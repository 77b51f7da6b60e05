"""Forecast what a rank of a training needs on a device, from one traced step. See `trace_step`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import FrameworkError, RunError, describe_error, raised_at
from framework.jobs.plan import cuda_rules
from framework.jobs.plan.changes import Change, kinds_of_changes
from framework.jobs.plan.devices import Device, find_device, gpus_by_memory
from framework.jobs.plan.step import PreparedStep, prepared_step, trace_step
from framework.jobs.plan.trace import (
    BUCKETS,
    BUFFERS,
    GRADIENTS,
    OPTIMIZER,
    OTHERS,
    TEMPORARIES,
    WEIGHTS,
    Moment,
    Trace,
)
from framework.jobs.plan.workspaces import with_workspaces
from framework.system.formatting import format_binary_bytes
from framework.system.hardware import available_memory

_WITH_ANY_BATCH = (WEIGHTS, GRADIENTS, BUCKETS, OPTIMIZER, BUFFERS)
# Modules that are listed, those that take most.
_SHOWN_MODULES = 8
_MAX_CHANGES = 3
# FLOPs that a GPU makes while it moves a byte: an A100 makes 19.5 TFLOP/s in float32, and moves 2 TB/s. Half precision
# is taken to be four times as fast; at its peak it is 16 times as fast, which steps don't reach.
_FLOPS_PER_BYTE = 10
_FLOPS_PER_BYTE_IN_HALF = 40
# Traces made to find the largest batch.
_MAX_SEARCHES = 3
# How many times as large the next one is, if the batch hasn't decided the peak.
_MUCH_LARGER = 64
# CPU seconds after which no further change is traced.
_CHANGES_S = 20.0
# The most CPU seconds of steps with real tensors.
_REAL_STEPS_S = 100.0


class TriedChange(NamedTuple):
    """A change that may make the training fit, and what it takes."""

    # As typed.
    overrides: tuple[str, ...]
    # Of all nodes; 0 on the CPU.
    gpus: int
    # Bytes of a rank.
    peak: int
    fits: bool
    # How much longer a step computes, about; what ranks exchange isn't counted.
    cost_percent: int


def forecast(
    config: Config, topology: Topology, *, kept_bytes: int, state_bytes: int
) -> tuple[dict[str, Any], Trace | None]:
    """Return the forecast for `plan.device`, under the keys listed in `plan.job`, and the trace that it rests on.

    Args:
        kept_bytes: what strategy and callbacks keep besides: averages, anchors, errors.
        state_bytes: of weights, gradients and optimizer.
    """
    name = config.plan.device
    assert name is not None
    device = find_device(name, uses_gpus=topology.gpus_per_node > 0)
    notes: list[str] = []
    trace = None
    values: dict[str, Any] = {
        "device": None,
        "memory": None,
        "largest_batch": None,
        "gpus": [],
        "changes": [],
        "assumed": [],
        "notes": notes,
    }
    try:
        with prepared_step(config, topology) as prepared:
            memory = StepMemory(prepared, config, device, kept_bytes=kept_bytes, state_bytes=state_bytes, notes=notes)
            if name == "any":
                memory.choose_gpu()
            values["memory"] = memory.described()
            values["largest_batch"] = memory.largest_batch()
            values["gpus"] = memory.gpus_that_hold_it()
            if memory.fits is False:
                values["changes"] = [change._asdict() for change in memory.cheapest_changes(_MAX_CHANGES)]
            device = memory.device
            trace = memory.trace
    except Exception as error:
        # The user's model may raise anything; the plan is known all the same.
        reason = describe_error(error)
        if not isinstance(error, FrameworkError):
            reason += f"\n{raised_at(error)}"
        notes.append(f"The memory of a step can't be forecast here: {reason}")
    values["device"] = {
        "name": device.name,
        "memory": device.memory_bytes,
        "usable": usable_bytes(device, topology),
    }
    values["assumed"] = _assumed(config, topology, device)
    return values, trace


def usable_bytes(device: Device, topology: Topology) -> int | None:
    """Return what torch's allocator of a rank may take of the device; None if unknown."""
    if device.memory_bytes is None:
        return None
    if not device.is_gpu:
        return device.memory_bytes // topology.procs_per_node
    spare_bytes = int(cuda_rules.SPARE_SHARE * device.memory_bytes)
    return (device.memory_bytes - spare_bytes) // topology.procs_per_gpu - cuda_rules.CONTEXT_BYTES


def _assumed(config: Config, topology: Topology, device: Device) -> list[str]:
    assumed = ["every micro-batch is as large as the first one; not counted: samples that the loader keeps"]
    if config.trainer.compile is not None:
        assumed.append("the model isn't compiled, which usually takes less")
    if topology.span > 1:
        assumed.append(f"the peak is that of the {topology.span} devices of a rank together")
    if not device.is_gpu:
        assumed.append("the largest batch leaves out what operators take while they run")
        return assumed
    return [
        *assumed,
        *cuda_rules.ASSUMED,
        "the time of a change is that of its FLOPs and bytes, without what ranks exchange",
        "not checked on a GPU",
    ]


@final
class StepMemory:
    """The memory of a training's step on a device.

    Args:
        prepared: of the training.
        config: as requested.
        kept_bytes: what strategy and callbacks keep besides.
        state_bytes: of weights, gradients and optimizer.
        notes: to which it adds what the reader is to know.
        runs_operators: on a CPU, run the operators that may decide the peak, to see what they take.
    """

    def __init__(
        self,
        prepared: PreparedStep,
        config: Config,
        device: Device,
        *,
        kept_bytes: int = 0,
        state_bytes: int = 0,
        notes: list[str],
        runs_operators: bool = True,
    ) -> None:
        self.device = device
        self._prepared = prepared
        self._topology = prepared.setup.context.topology
        # With the batch size of the data, if the request leaves it open.
        self._config = replace(config, data=replace(config.data, batch_size=prepared.setup.config.data.batch_size))
        self._kept_bytes = kept_bytes
        self._state_bytes = state_bytes
        self._notes = notes
        # False once a step has turned out to need the values of tensors.
        self._is_fake = True
        self.trace = self._first_trace()
        if runs_operators and not device.is_gpu:
            self.trace = with_workspaces(self.trace)
        self._peak = self.trace.peak()

    # The peak

    @property
    def peak_bytes(self) -> int:
        return self._total_bytes(self._peak, self.device)

    @property
    def by_category(self) -> dict[str, int]:
        """The bytes of each category at the peak."""
        categories = dict(self._peak.by_category)
        categories[OTHERS] += self._kept_bytes
        if self.device.is_gpu:
            categories[TEMPORARIES] += cuda_rules.workspace_bytes(self.device.name)
        return categories

    @property
    def usable_bytes(self) -> int | None:
        return usable_bytes(self.device, self._topology)

    @property
    def fits(self) -> bool | None:
        """None if the device's memory is unknown."""
        if self.usable_bytes is None:
            return None
        return self.peak_bytes <= self.usable_bytes

    def choose_gpu(self) -> None:
        """Take the smallest GPU that holds the step, if there is one."""
        names = self.gpus_that_hold_it()
        if names:
            self.device = dict(gpus_by_memory())[names[0]]

    def gpus_that_hold_it(self) -> list[str]:
        """Return the names of the GPUs on which the step fits, the smallest first; none for a CPU."""
        names = []
        if self.device.is_gpu:
            for name, gpu in gpus_by_memory():
                if self._total_bytes(self._peak, gpu) <= (usable_bytes(gpu, self._topology) or 0):
                    names.append(name)
        return names

    def described(self) -> dict[str, Any]:
        """Return `memory` of the forecast."""
        by_module: Counter[str] = Counter()
        for (_, module), size_bytes in self._peak.by_module.items():
            by_module[module] += size_bytes
        operator = self._peak.operator
        return {
            "peak": self.peak_bytes,
            "fits": self.fits,
            "categories": self.by_category,
            "modules": {module: size for module, size in by_module.most_common(_SHOWN_MODULES) if module},
            "at": {"operator": operator.name, "module": operator.module, "phase": operator.phase},
        }

    def _total_bytes(self, peak: Moment, device: Device) -> int:
        total_bytes = peak.total_bytes + self._kept_bytes
        if device.is_gpu:
            total_bytes += cuda_rules.workspace_bytes(device.name)
        return total_bytes

    # Traces

    def _first_trace(self) -> Trace:
        try:
            return self._traced(self._prepared)
        except FrameworkError:
            raise
        except Exception as error:
            self._use_real_tensors(error)
            return self._traced(self._prepared)

    def _use_real_tensors(self, error: Exception) -> None:
        """Have traces made with real tensors, since fake ones have raised this error."""
        free_bytes = available_memory()
        if free_bytes is not None and self._state_bytes > free_bytes // 2:
            least = format_binary_bytes(self._state_bytes)
            raise RunError(
                f"It can't be traced without the values of tensors ({describe_error(error)}), and with them it would "
                f"take more than {least} of the {format_binary_bytes(free_bytes)} here."
            ) from error
        self._is_fake = False
        self._notes.append(
            "The step was made with real tensors, since it can't be traced without their values: "
            f"{describe_error(error)}"
        )

    def _traced(self, prepared: PreparedStep, *, samples: int | None = None) -> Trace:
        trace = trace_step(
            prepared,
            is_fake=self._is_fake,
            samples=samples,
            for_cuda=self.device.is_gpu,
            limit_s=None if self._is_fake else _REAL_STEPS_S,
        )
        if self.device.is_gpu:
            return cuda_rules.on_cuda(trace)
        return trace

    # The largest batch

    def largest_batch(self) -> int | None:
        """Return the most samples of a micro-batch that fit; None if that isn't known.

        The peak is the maximum of lines over the number of samples, so the line through two traces, continued, is at
        most the peak. Each trace where that line ends moves it nearer to the answer.
        """
        limit_bytes = self.usable_bytes
        if limit_bytes is None or self.trace.samples == 0 or not self._is_fake:
            return None
        low = 0
        low_bytes = 0
        high = self.trace.samples
        # Workspaces are left out: they are known for the traced size only.
        high_bytes = self._bytes_with(high)
        try:
            for search in range(_MAX_SEARCHES):
                slope = (high_bytes - low_bytes) / (high - low)
                if search == 0:
                    guess = 2 * high
                elif slope <= 0:
                    # The peak of small batches lies in the update, whatever their size.
                    guess = _MUCH_LARGER * high
                else:
                    guess = int(high + (limit_bytes - high_bytes) / slope)
                if guess in (low, high):
                    break
                if guess < 1:
                    return 0
                guess_bytes = self._bytes_with(guess)
                (low, low_bytes), (high, high_bytes) = sorted([(high, high_bytes), (guess, guess_bytes)])
        except Exception as error:
            # The user's model may need as many samples as it got.
            self._notes.append(f"The largest batch isn't known: {describe_error(error)}")
            return None
        slope = (high_bytes - low_bytes) / (high - low)
        if slope <= 0:
            return None
        if high_bytes <= limit_bytes:
            return high
        return max(0, int(high - (high_bytes - limit_bytes) / slope))

    def _bytes_with(self, samples: int) -> int:
        """Return the peak with micro-batches of as many samples."""
        if samples == self.trace.samples and self.device.is_gpu:
            return self.peak_bytes
        return self._total_bytes(self._traced(self._prepared, samples=samples).peak(), self.device)

    # Changes

    def cheapest_changes(self, most: int, *, limit_bytes: int | None = None) -> list[TriedChange]:
        """Return the cheapest changes that make the step fit; if none does, those that take least.

        After some seconds nothing else is tried.

        Args:
            most: how many of them.
            limit_bytes: the largest peak that fits; None: what the device has.
        """
        if limit_bytes is None:
            limit_bytes = self.usable_bytes or 0
        ends_s = time.process_time() + _CHANGES_S
        fitting: list[TriedChange] = []
        others: list[TriedChange] = []
        keeps_model = self._model_fits(limit_bytes)
        for kind in kinds_of_changes(self._config, self._topology, self.device, keeps_model=keeps_model):
            for change in kind:
                if len(fitting) == most:
                    return _cheapest(fitting, others, most)
                if time.process_time() > ends_s:
                    self._notes.append("Further changes, which may be cheaper, weren't tried: it would take too long.")
                    return _cheapest(fitting, others, most)
                if any(set(less.overrides) <= set(change.overrides) for less in fitting):
                    # A part of it is enough.
                    break
                try:
                    tried = self._tried(change, limit_bytes)
                except Exception as error:
                    # The model, the task or the batch doesn't support it, nor what the kind changes further.
                    reason = describe_error(error).partition("\n")[0]
                    self._notes.append(f"{' '.join(change.overrides)} isn't possible: {reason}")
                    break
                if tried.fits:
                    fitting.append(tried)
                    break
                others.append(tried)
        return _cheapest(fitting, others, most)

    def _model_fits(self, limit_bytes: int) -> bool:
        """Return False if what there is with any batch is too much already."""
        categories = self.trace.update().by_category
        least_bytes = self._kept_bytes + sum(categories[category] for category in _WITH_ANY_BATCH)
        return least_bytes < limit_bytes

    def _tried(self, change: Change, limit_bytes: int) -> TriedChange:
        with prepared_step(change.config, change.topology) as prepared:
            trace = self._traced(prepared)
        gpus = 0
        if self.device.is_gpu:
            gpus = change.topology.world_size * change.topology.span
        peak_bytes = self._total_bytes(trace.peak(), self.device)
        cost = _cost(trace) / _cost(self.trace)
        return TriedChange(change.overrides, gpus, peak_bytes, peak_bytes <= limit_bytes, round(100 * (cost - 1)))


def _cheapest(fitting: Sequence[TriedChange], others: Sequence[TriedChange], most: int) -> list[TriedChange]:
    if fitting:
        return sorted(fitting, key=lambda change: (change.gpus, change.cost_percent))
    return sorted(others, key=lambda change: change.peak)[:most]


def _cost(trace: Trace) -> float:
    """Return about how long a step computes, in the time that moving a byte takes."""
    cost = 0.0
    for operator in trace.operators:
        moved_bytes = operator.read_bytes + operator.written_bytes
        flops_per_byte = _FLOPS_PER_BYTE
        if operator.dtype in (torch.bfloat16, torch.float16):
            flops_per_byte = _FLOPS_PER_BYTE_IN_HALF
        cost += trace.times(operator) * max(moved_bytes, operator.flops / flops_per_byte)
    return cost
