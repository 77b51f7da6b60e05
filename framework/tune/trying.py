"""Steps that a rank makes by itself to see whether a batch fits: no other rank takes part in them, so none can wait.

A rank that runs out of memory in the midst of a step would leave the others waiting in the exchange of its gradients,
for as long as the time-out is. So here nothing is exchanged: each rank makes the whole step with a replica that no
strategy has wrapped, and only then do they tell each other how it went. What the strategy needs besides is held
meanwhile, as memory that is filled.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from framework.causes import said
from framework.data.loader import TrainLoader
from framework.data.stream_loader import StreamLoader
from framework.footprint import tensor_bytes
from framework.preflight.wording import amount
from framework.trainer import Trainer
from framework.tune.dealing import Dealing
from framework.tune.memory import Memory, is_out_of_memory
from framework.types import Window

Held = Mapping[torch.device, int]
"""Bytes to keep taken on each device."""


@dataclass(frozen=True)
class Tried:
    """How a size went on one rank. refusal: why it doesn't fit, None where it does; step_s: of the fastest step."""

    refusal: str | None
    peak_bytes: int | None = None
    step_s: float | None = None


@final
class Trials:
    """One rank's trials, with a trainer whose strategy is `AsItIs`. Its weights stay as they are: the rate is 0.

    steps: of each trial; two at least: the first, in which the optimizer's state is made, isn't measured. held: what
    other parts of a run will take, kept taken during a trial.
    """

    def __init__(
        self, trainer: Trainer, dealing: Dealing, memory: Memory, *, steps: int, held: Held | None = None
    ) -> None:
        self._trainer, self._dealing, self._memory = trainer, dealing, memory
        self._steps, self._held = steps, held or {}
        self._peaks: dict[int, int] = {}  # of what fitted, by the samples of a pass
        for group in trainer.parts.optimizer.param_groups:
            group["lr"] = 0.0

    def try_size(self, size: int) -> Tried:
        """Make some steps with `size` samples in each pass. Passes what is raised that isn't about memory.

        Where memory can't be tried out, what is expected not to fit isn't begun.
        """
        size = self._dealing.pass_size(size)
        expected = None if self._memory.is_held else self._beyond(size)
        if expected is not None:
            return Tried(f"would take about {amount(expected)} of {amount(self._memory.room_bytes or 0)}")
        return self._measured(size)

    def _measured(self, size: int) -> Tried:
        room = self._memory.room_bytes
        self._memory.clear()
        refusal, step_s = self._make_steps(size)
        peak = self._memory.peak_bytes()
        self._memory.clear()  # at once: other processes of this machine may be at their steps yet
        if refusal is None and room is not None and peak is not None and peak > room:
            refusal = f"took {amount(peak)} of {amount(room)}"
        if refusal is None and peak is not None:
            self._peaks[size] = peak
        return Tried(refusal, peak, step_s)

    def _make_steps(self, size: int) -> tuple[str | None, float | None]:
        """Why it doesn't fit, and the seconds of the fastest step. What an error held on to is free on return."""
        plan = self._dealing.trial(size)
        dealt = self._trainer.train_loader
        assert isinstance(dealt, TrainLoader), "a stream can't be dealt anew"
        loader = dealt.replanned(plan, limit=self._dealing.whole_steps(plan))
        step_s: float | None = None
        try:
            held = [torch.ones(size_bytes, dtype=torch.uint8, device=at) for at, size_bytes in self._held.items()]
            with closing(endless(loader)) as windows:
                for number, window in enumerate(islice(windows, self._steps)):
                    if number == 1:  # what was loaded and compiled for the first isn't what a step takes
                        self._memory.clear()
                        step_s = None
                    began = time.perf_counter()
                    self._trainer.train_step(window)
                    self._trainer.context.wait_for_devices()
                    taken = time.perf_counter() - began
                    step_s = taken if step_s is None else min(step_s, taken)
            held.clear()
        except Exception as error:  # of the user's code as well: it passes, unless it is about memory
            if not is_out_of_memory(error):
                raise
            return said(error), None
        finally:
            self._trainer.parts.optimizer.zero_grad(set_to_none=True)
        return None, step_s

    def _beyond(self, size: int) -> int | None:
        """The peak that is expected, where that is more than the room; None where it isn't, or nothing is known.

        One measurement doesn't tell how much of it is weights, gradients and the optimizer's state, which no batch
        makes larger. So where all of it being the samples' would be too much, a second one is made before it is said.
        """
        room = self._memory.room_bytes
        if room is None or not self._peaks or size <= max(self._peaks):
            return None
        if len(self._peaks) == 1:
            (known,) = self._peaks
            if self._expected(size) <= room:
                return None
            # Less is safer; but with a single sample batch normalisation raises an error.
            another = self._dealing.pass_size(known - 1 if known > 2 else known + 1)
            if another in (known, size):  # passes of a global batch come in few sizes
                return None
            self._measured(another)
        expected = self._expected(size)
        return expected if expected > room else None

    def _expected(self, size: int) -> int:
        """The peak, from the two largest sizes that fitted.

        Activations grow as the batch does, and all else doesn't: a line through both, through 0 where there is one.
        """
        known = sorted(self._peaks.items())[-2:]
        last_size, last = known[-1]
        if len(known) == 1:
            return last * size // last_size
        before_size, before = known[0]
        per_sample = max(last - before, 0) / (last_size - before_size)
        return last + int(per_sample * (size - last_size))


def endless(loader: TrainLoader | StreamLoader) -> Generator[Window, None, None]:
    """Windows of one epoch after another."""
    for epoch in count():
        yield from loader.epoch(epoch)


def all_tried(mine: Tried, group: dist.ProcessGroup | None, *, world_size: int) -> list[Tried]:
    """How it went on every rank, in the order of ranks. Every rank must call it. group: over the CPU; None alone."""
    if group is None:
        return [mine]
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, mine, group=group)
    return results


def held_for_strategy(model: nn.Module, *, copies: int, averages: int) -> dict[torch.device, int]:
    """Bytes on each device for `copies` of all gradients, and for `averages` of the whole model."""
    found: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        times = averages + (copies if tensor.requires_grad else 0)  # no buffer does
        found[tensor.device] = found.get(tensor.device, 0) + times * tensor_bytes([tensor])
    return {device: size_bytes for device, size_bytes in found.items() if size_bytes}
