"""Forecast what a rank of a training needs on a device, from one traced step. See `trace_step`.

The result has plain values, under the keys listed in `plan.job`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import FrameworkError, describe_error, raised_at
from framework.jobs.plan import cuda_rules
from framework.jobs.plan.devices import Device, find_device, gpus_that_hold
from framework.jobs.plan.step import NEEDS_VALUES, trace_step
from framework.jobs.plan.trace import OTHERS, TEMPORARIES, Peak, Trace
from framework.jobs.plan.workspaces import with_workspaces

# Modules that are listed, those that take most.
_SHOWN_MODULES = 8
_MAX_CHANGES = 3
# FLOPs that a device makes while it moves one byte: about that of the GPUs of today, 312 TFLOP/s at 2 TB/s.
_FLOPS_PER_BYTE = 150
# Traces made to find the largest batch.
_MAX_SEARCHES = 3


def forecast(config: Config, topology: Topology, *, backend: str, kept_bytes: int) -> dict[str, Any]:
    """Return the forecast for `plan.device`.

    Args:
        kept_bytes: what strategy and callbacks keep besides: averages, anchors, errors.
    """
    assert config.plan.device is not None
    device = find_device(config.plan.device, uses_gpus=topology.gpus_per_node > 0)
    return _Forecast(config, topology, device, backend=backend, kept_bytes=kept_bytes).values()


class _Change(NamedTuple):
    """A change of the configuration that may take less memory."""

    # As typed.
    overrides: tuple[str, ...]
    config: Config


@final
class _Forecast:
    def __init__(self, config: Config, topology: Topology, device: Device, *, backend: str, kept_bytes: int) -> None:
        self._config = config
        self._topology = topology
        self._device = device
        self._backend = backend
        self._kept_bytes = kept_bytes
        # False once a step has turned out to need the values of tensors.
        self._is_fake = True
        self._notes: list[str] = []

    def values(self) -> dict[str, Any]:
        device = {
            "name": self._device.name,
            "memory": self._device.memory_bytes,
            "usable": self._usable_bytes,
        }
        values: dict[str, Any] = {
            "device": device,
            "memory": None,
            "largest_batch": None,
            "gpus": [],
            "changes": [],
            "assumed": self._assumed(),
            "notes": self._notes,
        }
        try:
            trace = self._trace(self._config)
        except Exception as error:
            # The user's model may raise anything; the plan is known all the same.
            self._notes.append(
                f"The memory of a step can't be forecast here: {describe_error(error)}\n{raised_at(error)}"
            )
            return values

        peak = trace.peak()
        total_bytes = self._total_bytes(peak)
        values["memory"] = self._memory(trace, peak)
        if self._device.is_gpu:
            values["gpus"] = gpus_that_hold(self._needed_bytes(total_bytes))
        if self._is_fake:
            values["largest_batch"] = self._largest_batch(trace, total_bytes)
        if self._usable_bytes is not None and total_bytes > self._usable_bytes:
            values["changes"] = self._changes(trace)
        return values

    # Traces

    def _trace(self, config: Config, *, samples: int | None = None) -> Trace:
        make = partial(
            trace_step,
            config,
            self._topology,
            backend=self._backend,
            samples=samples,
            for_cuda=self._device.is_gpu,
        )
        try:
            trace = make(is_fake=self._is_fake)
        except NEEDS_VALUES as error:
            if samples is not None:
                raise
            self._is_fake = False
            self._notes.append(f"The step was made with real tensors, since it needs values: {describe_error(error)}")
            trace = make(is_fake=False)
        if self._device.is_gpu:
            return cuda_rules.on_cuda(trace)
        if config is self._config and samples is None:
            return with_workspaces(trace)
        # Running operators for other sizes would take their memory and time.
        return trace

    # Memory

    @property
    def _usable_bytes(self) -> int | None:
        """What torch's allocator may take of the device; None if unknown."""
        memory_bytes = self._device.memory_bytes
        if memory_bytes is None:
            return None
        if not self._device.is_gpu:
            return memory_bytes // self._topology.procs_per_node
        spare_bytes = int(cuda_rules.SPARE_SHARE * memory_bytes)
        return (memory_bytes - spare_bytes) // self._topology.procs_per_gpu - cuda_rules.CONTEXT_BYTES

    def _needed_bytes(self, total_bytes: int) -> int:
        """Return the memory that a GPU needs for a process which takes this much of torch's allocator."""
        return int((total_bytes + cuda_rules.CONTEXT_BYTES) / (1 - cuda_rules.SPARE_SHARE))

    def _total_bytes(self, peak: Peak) -> int:
        return peak.total_bytes + self._kept_bytes + self._workspace_bytes

    @property
    def _workspace_bytes(self) -> int:
        if not self._device.is_gpu:
            return 0
        return cuda_rules.workspace_bytes(self._device.name)

    def _memory(self, trace: Trace, peak: Peak) -> dict[str, Any]:
        categories = dict(peak.by_category)
        categories[OTHERS] += self._kept_bytes
        categories[TEMPORARIES] += self._workspace_bytes
        by_module: Counter[str] = Counter()
        for (_, module), size_bytes in peak.by_module.items():
            by_module[module] += size_bytes
        operator = trace.operators[peak.operator]
        usable_bytes = self._usable_bytes
        total_bytes = self._total_bytes(peak)
        return {
            "peak": total_bytes,
            "fits": None if usable_bytes is None else total_bytes <= usable_bytes,
            "categories": categories,
            "modules": {module: size for module, size in by_module.most_common(_SHOWN_MODULES) if module},
            "at": {"operator": operator.name, "module": operator.module, "phase": operator.phase},
        }

    def _assumed(self) -> list[str]:
        assumed = ["every micro-batch is as large as the first one; not counted: samples that the loader keeps"]
        if self._config.trainer.compile is not None:
            assumed.append("the model isn't compiled, which usually takes less")
        if self._device.is_gpu:
            assumed += cuda_rules.ASSUMED
            assumed.append("not checked on a GPU")
        else:
            assumed.append("the largest batch leaves out what operators take while they run")
        return assumed

    # The largest batch

    def _largest_batch(self, trace: Trace, total_bytes: int) -> int | None:
        """Return the most samples of a micro-batch that fit; None if that isn't known.

        The peak is the maximum of lines over the number of samples, so the line through two traces, continued, is at
        most the peak. Each trace where that line ends moves it nearer to the answer.
        """
        usable_bytes = self._usable_bytes
        if usable_bytes is None or trace.samples == 0:
            return None
        if not self._device.is_gpu:
            # Leave out the workspaces: they are known for this size only.
            trace = self._trace(self._config, samples=trace.samples)
            total_bytes = self._total_bytes(trace.peak())
        low = 0
        low_bytes = 0
        high = trace.samples
        high_bytes = total_bytes
        try:
            for search in range(_MAX_SEARCHES):
                if search == 0:
                    guess = 2 * high
                else:
                    slope = (high_bytes - low_bytes) / (high - low)
                    if slope <= 0:
                        return None
                    guess = int(high + (usable_bytes - high_bytes) / slope)
                if guess in (low, high):
                    break
                if guess < 1:
                    return 0
                guess_bytes = self._total_bytes(self._trace(self._config, samples=guess).peak())
                (low, low_bytes), (high, high_bytes) = sorted([(high, high_bytes), (guess, guess_bytes)])
        except (FrameworkError, *NEEDS_VALUES) as error:
            self._notes.append(f"The largest batch isn't known: {describe_error(error)}")
            return None
        if high_bytes <= usable_bytes:
            return high
        slope = (high_bytes - low_bytes) / (high - low)
        return max(0, int(high - (high_bytes - usable_bytes) / slope))

    # Changes

    def _changes(self, trace: Trace) -> list[dict[str, Any]]:
        """Return the cheapest changes that make the training fit; if none does, those that take least."""
        before = _cost(trace)
        changes: list[dict[str, Any]] = []
        for change in _possible_changes(self._config):
            try:
                changed = self._trace(change.config)
            except Exception as error:
                # The model, the task or the strategy may not support it.
                self._notes.append(f"{' '.join(change.overrides)} isn't possible: {describe_error(error)}")
                continue
            total_bytes = self._total_bytes(changed.peak())
            changes.append(
                {
                    "overrides": list(change.overrides),
                    "peak": total_bytes,
                    "fits": total_bytes <= (self._usable_bytes or 0),
                    "cost_percent": round(100 * (_cost(changed) / before - 1)),
                }
            )
        fitting = [change for change in changes if change["fits"]]
        if fitting:
            return sorted(fitting, key=lambda change: change["cost_percent"])[:_MAX_CHANGES]
        return sorted(changes, key=lambda change: change["peak"])[:_MAX_CHANGES]


def _cost(trace: Trace) -> float:
    """Return about how long a step computes, in the time that moving a byte takes."""
    cost = 0.0
    for operator in trace.operators:
        moved_bytes = operator.read_bytes + operator.written_bytes
        cost += max(moved_bytes, operator.flops / _FLOPS_PER_BYTE)
    return cost


def _possible_changes(config: Config) -> Iterator[_Change]:
    """Yield what may take less memory for the same global batch, alone and together."""
    recompute = ("trainer.activation_checkpointing=auto",)
    recomputing = replace(config.trainer, activation_checkpointing="auto")
    can_recompute = config.trainer.activation_checkpointing is None
    if can_recompute:
        yield _Change(recompute, replace(config, trainer=recomputing))

    if config.trainer.precision == "32-true":
        mixed = replace(config.trainer, precision="bf16-mixed")
        yield _Change(("trainer.precision=bf16-mixed",), replace(config, trainer=mixed))

    batch_size = config.data.batch_size
    for times in (2, 4):
        steps = times * config.trainer.accumulate_grad_batches
        overrides = [f"trainer.accumulate_grad_batches={steps}"]
        data = config.data
        if data.global_batch_size is None:
            if batch_size == "auto" or batch_size % times != 0:
                continue
            data = replace(data, batch_size=batch_size // times)
            overrides.append(f"data.batch_size={batch_size // times}")
        accumulating = replace(config.trainer, accumulate_grad_batches=steps)
        yield _Change(tuple(overrides), replace(config, trainer=accumulating, data=data))
        if can_recompute:
            both = replace(accumulating, activation_checkpointing="auto")
            yield _Change((*recompute, *overrides), replace(config, trainer=both, data=data))
