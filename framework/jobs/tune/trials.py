"""Try a batch size on all ranks: a few training steps, and the memory that they took."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from framework.data.loader import MapLoader
from framework.distributed.collectives import barrier
from framework.distributed.sharded import local_tensor
from framework.distributed.stand_in_group import STAND_IN, as_default_group, new_stand_in_group
from framework.engine.build_trainer import build_trainer
from framework.engine.builders.strategy import build_strategy
from framework.engine.out_of_memory import is_out_of_memory
from framework.engine.setup import RankSetup
from framework.engine.state_bytes import average_dtype
from framework.errors import describe_error
from framework.jobs.tune.memory import DeviceMemory, HostMemory
from framework.jobs.tune.sizes import BatchSizing, Forecast
from framework.jobs.tune.steps import full_steps, train_steps
from framework.strategies.base import Strategy
from framework.strategies.fsdp import gathered_bytes
from framework.system.formatting import format_binary_bytes
from framework.training.trainer import Trainer

T = TypeVar("T")

# On the host, the next size is at most so many times the largest measured one, and the first one that part of what is
# forecast to fit: a batch that is too large gets a process killed.
_MAX_GROWTH = 4
# What the next size is predicted from is at most so large a part of the largest measured one.
_SMALLER = 0.75
# gloo gathers and reduces in copies, and each of its threads keeps the memory of one. Measured with 2 and 4 processes.
_GLOO_THREADS = 2


@dataclass
class _Outcome:
    """What came of a trial on one rank."""

    # Why the size doesn't fit; None if it does.
    refusal: str | None
    peak_bytes: int | None = None
    # Of the fastest step.
    step_s: float | None = None
    # A step ended in the middle.
    is_interrupted: bool = False


class _Copied(NamedTuple):
    """A tensor of the model, or this rank's part of it, of which the run keeps copies besides."""

    tensor: Tensor
    copies: int
    has_gradient: bool


class _Line(NamedTuple):
    """How the peak grows with the batch."""

    # The largest size that was measured, and its peak.
    size: int
    peak_bytes: int
    bytes_per_sample: float


@final
class Trials:
    """Tries batch sizes on all ranks, each by itself. Weights don't change, since the learning rate is set to 0.

    A rank that runs out of memory in the middle of a step would leave the others waiting in a collective. So in a trial
    all collectives are those of a stand-in, which exchange nothing, and the ranks exchange only the outcome.

    A strategy that communicates in the forward shards the model over the stand-in, and takes the memory that it takes
    in training. Other strategies are left out, and the memory that they need on top is allocated meanwhile.
    """

    memory: HostMemory | DeviceMemory

    def __init__(self, setup: RankSetup, loader: MapLoader, sizing: BatchSizing, *, averages: int) -> None:
        """Every rank must make one. averages: see `find_batch_size`."""
        self._setup = setup
        self._context = setup.context
        self._loader = loader
        self._sizing = sizing
        self._averages = averages
        self._steps = setup.config.tune.steps_per_trial
        # The trials as tune.json has them, by samples.
        self.tried: dict[int, dict[str, Any]] = {}
        # The largest peak of all ranks, for the sizes with which every rank made its steps.
        self._peaks: dict[int, int] = {}
        self._stand_in = new_stand_in_group()
        self._trainer = self._build()
        # What exchanges take that the stand-in leaves out.
        self._exchange_bytes = 0
        if self._context.backend == "gloo" and self._context.world_size > 1:
            self._exchange_bytes = _GLOO_THREADS * gathered_bytes(self._trainer.state.bare_model)
        # Outcomes are exchanged over the CPU.
        self._exchange = setup.exchange
        self._exchange.open()

        # All processes of a node measure what is free before one of them takes it.
        margin = setup.config.tune.margin
        topology = self._context.topology
        barrier(self._context)
        if self._context.device.type == "cpu":
            self.memory = HostMemory(sharing=topology.procs_per_node, margin=margin)
        else:
            self.memory = DeviceMemory(self._context.devices, sharing=topology.procs_per_gpu, margin=margin)
        barrier(self._context)
        rooms = [room for room in self._of_all_ranks(self.memory.room_bytes) if room is not None]
        self._least_room_bytes = min(rooms, default=None)

    def fits(self, size: int) -> bool:
        """Return True if a pass of `size` samples fits on every rank. Every rank must call it.

        Passes on errors that aren't about memory.
        """
        size = self._sizing.pass_size(size)
        # Several sizes split a global batch in the same way.
        if size not in self.tried:
            outcomes = self._of_all_ranks(self._try(size))
            self.tried[size] = self._combined(size, outcomes)
            peak_bytes = self.tried[size]["peak_bytes"]
            if peak_bytes is not None and all(outcome.step_s is not None for outcome in outcomes):
                self._peaks[size] = peak_bytes
            if self._context.is_main:
                print(_line(self.tried[size]), flush=True)
            if any(outcome.is_interrupted for outcome in outcomes):
                self._rebuild()
        return bool(self.tried[size]["fits"])

    def _build(self) -> Trainer:
        """Build the trainer of the trials. Every rank must call it, since it may make groups."""
        strategy = Strategy()
        context = replace(self._context, backend=STAND_IN)
        if self._setup.strategy.forward_communicates:
            strategy = build_strategy(self._setup.config.strategy, context=context)
        with as_default_group(self._stand_in):
            trainer = build_trainer(replace(self._setup, context=context, strategy=strategy), self._loader, {})
        trainer.weight_own_samples()
        for param_group in trainer.state.optimizer.param_groups:
            param_group["lr"] = 0.0
        return trainer

    def _rebuild(self) -> None:
        """Replace a sharded model that a step has left with gathered weights. Every rank must call it."""
        if self._setup.strategy.forward_communicates:
            del self._trainer
            gc.collect()
            self._trainer = self._build()

    def _copied(self) -> list[_Copied]:
        """Return the tensors of the model, and how many copies of each training keeps besides."""
        strategy = self._setup.strategy
        gradient_copies = strategy.costs().weight_copies
        if self._context.world_size > 1 and not strategy.forward_communicates:
            # The gradients that are exchanged.
            gradient_copies += 1
        model = self._trainer.state.bare_model
        copied = []
        for tensor in (*model.parameters(), *model.buffers()):
            # The average of a bfloat16 tensor is float32, which takes as much as two copies.
            copies_per_average = average_dtype(tensor).itemsize // tensor.itemsize
            copies = self._averages * copies_per_average
            if tensor.requires_grad:
                copies += gradient_copies
            copied.append(_Copied(local_tensor(tensor), copies, tensor.requires_grad))
        return copied

    def _of_all_ranks(self, own: T) -> list[T]:
        """Return the value of every rank, in the order of ranks."""
        return [self._exchange.broadcast(own, source=rank) for rank in range(self._context.world_size)]

    def _combined(self, size: int, outcomes: list[_Outcome]) -> dict[str, Any]:
        """Return the trial as tune.json has it. outcomes: of every rank."""
        peaks = [outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes is not None]
        trial: dict[str, Any] = {
            "batch_size": size,
            "fits": True,
            "refused_by": None,
            "refusal": None,
            "peak_bytes": max(peaks, default=None),
            "samples_per_s": None,
        }
        for rank, outcome in enumerate(outcomes):
            if outcome.refusal is not None:
                return {**trial, "fits": False, "refused_by": rank, "refusal": outcome.refusal}
        # Every rank has made its steps.
        slowest_s = max(outcome.step_s for outcome in outcomes if outcome.step_s is not None)
        samples = min(self._sizing.trial(size).global_batch_size, self._sizing.samples)
        return {**trial, "samples_per_s": samples / slowest_s}

    def _try(self, size: int) -> _Outcome:
        """Try the size on this rank."""
        expected = self._expected_bytes(size)
        room = self.memory.room_bytes
        if room is not None and expected > room:
            return _Outcome(f"would take about {format_binary_bytes(expected)} of {format_binary_bytes(room)}")

        self.memory.clear()
        outcome = self._make_steps(size)
        peak = self.memory.peak_bytes()
        # Freed at once, for other processes of this machine that may still make their steps.
        self.memory.clear()
        outcome.peak_bytes = peak
        if outcome.refusal is None and peak is not None and room is not None and peak > room:
            outcome.refusal = f"took {format_binary_bytes(peak)} of {format_binary_bytes(room)}"
        return outcome

    def _make_steps(self, size: int) -> _Outcome:
        """Train a few steps. On return their memory is free."""
        loader = full_steps(self._loader, self._sizing.trial(size))
        times_s: list[float] = []
        try:
            reserved = [torch.ones(self._exchange_bytes, dtype=torch.uint8)]
            for copied in self._copied():
                reserved += [torch.ones_like(copied.tensor) for _ in range(copied.copies)]
            with as_default_group(self._stand_in):
                for step_s in train_steps(self._trainer, loader, self._steps):
                    # The first step loads kernels and compiles.
                    if not times_s:
                        self.memory.clear()
                    times_s.append(step_s)
            del reserved
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return _Outcome(describe_error(error), is_interrupted=True)
        finally:
            self._trainer.state.optimizer.zero_grad(set_to_none=True)
        return _Outcome(None, step_s=min(times_s[1:]))

    def predicted_size(self, forecast: Forecast) -> int | None:
        """Return the largest size that should fit, on every rank the same; None if that is unknown.

        It follows from the peaks that were measured or, before that, from the forecast.
        """
        predicted: int | None = self._exchange.broadcast(self._predicted_size(forecast), source=0)
        return predicted

    def _predicted_size(self, forecast: Forecast) -> int | None:
        room = self._least_room_bytes
        if room is None:
            return None
        on_host = isinstance(self.memory, HostMemory)
        line = self._line()
        if line is None:
            predicted = forecast.largest(room - self._reserved_bytes())
            if predicted is not None and on_host:
                predicted //= _MAX_GROWTH
            return predicted

        if line.bytes_per_sample <= 0:
            return None
        predicted = line.size + int((room - line.peak_bytes) / line.bytes_per_sample)
        if on_host:
            predicted = min(predicted, _MAX_GROWTH * line.size)
        return predicted

    def _expected_bytes(self, size: int) -> int:
        """Return the peak to expect in the host's memory. Returns 0 if the size may be tried in any case."""
        line = self._line()
        if isinstance(self.memory, DeviceMemory) or line is None:
            return 0
        return int(line.peak_bytes + line.bytes_per_sample * (size - line.size))

    def _line(self) -> _Line | None:
        """Return the line through the peaks of the largest measured size and of a smaller one; None without a size.

        If no smaller one was measured, the line begins at what a step takes without any sample.
        """
        if not self._peaks:
            return None
        *others, size = sorted(self._peaks)
        previous_size = 0
        previous_bytes = self._fixed_bytes()
        # Peaks vary by chance, so a line through two that are close to each other may have any slope.
        smaller = [other for other in others if other <= _SMALLER * size and self._peaks[other] < self._peaks[size]]
        if smaller:
            previous_size = smaller[-1]
            previous_bytes = self._peaks[previous_size]
        growth_bytes = max(self._peaks[size] - previous_bytes, 0)
        return _Line(size, self._peaks[size], growth_bytes / (size - previous_size))

    def _reserved_bytes(self) -> int:
        """Return what a trial allocates besides its steps."""
        return self._exchange_bytes + sum(copied.copies * copied.tensor.nbytes for copied in self._copied())

    def _fixed_bytes(self) -> int:
        """Return what a step takes without any sample: the optimizer's state, copies and gradients."""
        fixed_bytes = self._reserved_bytes()
        for state in self._trainer.state.optimizer.state.values():
            fixed_bytes += sum(local_tensor(value).nbytes for value in state.values() if isinstance(value, Tensor))
        for copied in self._copied():
            if copied.has_gradient:
                fixed_bytes += copied.tensor.nbytes
        return fixed_bytes


def _line(trial: Mapping[str, Any]) -> str:
    """Return what is printed of a trial."""
    label = f"  batch {trial['batch_size']:<8,}"
    if not trial["fits"]:
        refusal = shorten(trial["refusal"], 90, placeholder="…")
        return f"{label} doesn't fit  rank {trial['refused_by']}: {refusal}"
    peak = ""
    if trial["peak_bytes"] is not None:
        peak = format_binary_bytes(trial["peak_bytes"])
    return f"{label} fits         {peak:>10}  {trial['samples_per_s']:,.0f} samples/s"
