"""Callbacks that look on while steps of a run are repeated, and write what they have seen in the run directory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch

from framework.callbacks.first_fault import Fault, Usual, first_fault, weights_leap
from framework.callbacks.layer_sizes import LayerSizes, StepSizes
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.system.run_dir import RunDir, write_object
from framework.types import Callback, FitInfo, MicroBatchInfo, StepInfo, StepOutput

# Steps that are kept, to know what is usual.
KEPT = 32
# Finite values that are this many times as large as in all of these steps are wrong.
OUTLIER = 3.0


class _Watching(Callback):
    """Measures every step, and writes `why/rank_N.json`."""

    def __init__(self, *, run_dir: RunDir, context: Context, norm: float, dtype: torch.dtype | None = None) -> None:
        self._run_dir = run_dir
        self._context = context
        self._norm = norm
        self._dtype = dtype

    def on_fit_start(self, info: FitInfo) -> None:
        self._sizes = LayerSizes(info.model, info.optimizer, norm=self._norm, dtype=self._dtype)
        self._add(self._sizes.end(info.start_step))

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        self._sizes.begin(info)

    def on_micro_batch_output(self, output: StepOutput) -> None:
        self._sizes.note_loss(output)

    def on_train_step_end(self, info: StepInfo) -> None:
        self._add(self._sizes.end(info.step))

    def close(self) -> None:
        if hasattr(self, "_sizes"):
            self._sizes.remove()

    def _add(self, sizes: StepSizes) -> None:
        """Take in a step. The first is what was there before: it has weights only."""
        raise NotImplementedError

    def _write(self, content: dict[str, Any]) -> None:
        folder = self._run_dir.path / "why"
        folder.mkdir(exist_ok=True)
        write_object(folder / f"rank_{self._context.rank}.json", {"rank": self._context.rank, **content})


@final
class FaultWatch(_Watching):
    """Finds the first fault: in the first step that isn't finite, or in one of the steps from `first` to `last`.

    Of several steps it is the one whose loss differs most from those of the steps around it.

    Args:
        first, last: None: the first step that isn't finite.
    """

    def __init__(self, *, run_dir: RunDir, context: Context, first: int | None = None, last: int | None = None) -> None:
        super().__init__(run_dir=run_dir, context=context, norm=math.inf)
        self._first = first
        self._last = last
        self._kept: deque[StepSizes] = deque(maxlen=KEPT)
        if first is not None and last is not None:
            self._kept = deque(maxlen=KEPT + last - first)
        self._fault: Fault | None = None
        self._step: int | None = None
        self._largest: dict[str, Any] | None = None

    def _add(self, sizes: StepSizes) -> None:
        if self._fault is not None:
            return
        if self._first is None and sizes.is_bad():
            self._fault = first_fault(sizes, self._kept)
            if self._fault is not None:
                self._sizes.remove()
        else:
            self._kept.append(sizes)

    def on_fit_end(self) -> None:
        if self._first is not None:
            self._look_at_one(self._first)
        content: dict[str, Any] = {"step": self._step, "largest": self._largest, "fault": None, "weights_leap": False}
        if self._fault is not None:
            fault = replace(self._fault, rank=self._context.rank)
            content["fault"] = {**fault.as_dict(), "order": list(fault.order), "text": fault.text()}
            content["weights_leap"] = weights_leap(sizes for sizes in self._kept if sizes.step < fault.step)
        self._write(content)

    def _look_at_one(self, first: int) -> None:
        """Find the fault of the step that differs most from the others. Every rank must call it."""
        steps = [sizes for sizes in self._kept if sizes.micro_batches]
        losses = [_loss(sizes) for sizes in steps]
        of_ranks = gather_to_all(losses, self._context)
        means = [sum(of_step) / len(of_step) for of_step in zip(*of_ranks, strict=True)]
        usual = sorted(means)[len(means) // 2]
        candidates = [position for position, sizes in enumerate(steps) if sizes.step >= first]
        if not candidates:
            return
        position = max(candidates, key=lambda number: _distance(means[number], usual))
        self._step = steps[position].step
        before = [sizes for sizes in self._kept if sizes.step < self._step]
        self._fault = first_fault(steps[position], before, factor=OUTLIER)
        if self._fault is None:
            self._largest = _largest(steps[position], before)


def _loss(sizes: StepSizes) -> float:
    """Return the mean loss of a step on this rank."""
    losses = [one.sizes[0] for one in sizes.measured() if one.event.kind == "loss" and one.event.direction == "forward"]
    return sum(losses) / max(1, len(losses))


def _distance(value: float, usual: float) -> float:
    """Return how far a loss is from the usual one; NaN is farthest."""
    if not math.isfinite(value):
        return math.inf
    return abs(value - usual)


def _largest(sizes: StepSizes, before: Sequence[StepSizes]) -> dict[str, Any] | None:
    """Return the place whose values are largest compared with the steps before."""
    usual = Usual()
    for earlier in before:
        usual.add(earlier.measured())
    largest: dict[str, Any] | None = None
    for one in sizes.measured():
        factor = usual.factor(one)
        if factor is not None and (largest is None or factor > largest["factor"]):
            event = one.event
            largest = {"factor": factor, "direction": event.direction, "kind": event.kind, "layer": event.layer}
    return largest


@final
class Trace(_Watching):
    """Writes what was computed in each step, to compare it with another run's.

    Norms are in double precision, so that different values have different ones.
    """

    def __init__(self, *, run_dir: RunDir, context: Context) -> None:
        super().__init__(run_dir=run_dir, context=context, norm=2.0, dtype=torch.float64)
        self._steps: list[dict[str, Any]] = []

    def _add(self, sizes: StepSizes) -> None:
        events = []
        for one in sizes.measured():
            event = one.event
            place = [event.direction, event.kind, event.layer, event.occurrence, event.micro_batch]
            events.append({"place": place, "type": event.type, "sizes": [size.hex() for size in one.sizes]})
        indices = []
        for info in sizes.micro_batches:
            indices.append(None if info.indices is None else info.indices.tolist())
        self._steps.append({"step": sizes.step, "indices": indices, "events": events})

    def on_fit_end(self) -> None:
        self._write({"steps": self._steps})
