"""What went wrong first in a step, by what `LayerSizes` measured in it and in the steps before. Plain numbers only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple, final

from framework.callbacks.layer_sizes import Direction, Event, Measured, StepSizes
from framework.system.formatting import format_count, format_numbers
from framework.types import MicroBatchInfo

Cause = Literal["sample", "activation", "layer", "loss", "learning_rate", "gradient", "update"]

# In a step that isn't finite, values that are this many times as large as in all steps before are part of the fault:
# what explodes in one layer is often infinite only in a later one.
EXPLODES = 1e3
# A weight that an update makes this many times as large was moved too far.
GROWS = 3.0
# A learning rate that is this many times that of the step before has jumped.
JUMPS = 10.0

_FORMATS = {"float32": "float32", "float16": "fp16", "bfloat16": "bf16", "float64": "float64"}


@final
@dataclass(frozen=True)
class Sample:
    """A sample of a micro-batch."""

    # Of the dataset; of a stream, its position. None if that is unknown.
    index: int | None
    # In the micro-batch, counted from 0.
    row: int
    # Of a sequence that is padded in the batch; None if that is unknown.
    length: int | None = None


@final
@dataclass(frozen=True)
class Fault:
    """The first fault of a step on one rank."""

    # Optimizer steps done, that one included.
    step: int
    # Counted from 0.
    micro_batch: int | None
    # Of a task with several losses; else empty.
    objective: str
    direction: Direction
    # What has the wrong values: an entry of the batch, input or output of a layer (in the backward: their gradient),
    # loss, parameter, weight.
    kind: str
    # The module's name, empty for the model itself; of a parameter or weight, the parameter's name; `batch[1]`.
    layer: str
    type: str
    # The module that the values were made in, if `layer` only got them; None if that was the task.
    inside: str | None
    # The layer that was called before, if `layer` only got the values.
    after: str | None
    dtype: str
    # "NaN", "infinite", "infinite or above 1e19", or "too large".
    values: str
    cause: Cause
    # How many samples the micro-batch has.
    num_samples: int
    # None if the values aren't told apart by samples.
    samples: list[Sample] | None
    # What the cause is read from, in half sentences.
    evidence: list[str] = field(default_factory=list)
    rank: int = 0
    # How many objectives of the task come before this one in a step.
    objectives_before: int = 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The first fault of several ranks has the least: what other ranks see of it comes later in a step.

        Each objective has an update of its own, after which all ranks have its fault in the forward of the next.
        """
        directions: list[Direction] = ["forward", "backward", "update"]
        return self.step, self.objectives_before, directions.index(self.direction), self.rank

    def as_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["objectives_before"]
        return fields

    def text(self) -> str:
        """Return a sentence that says where, and one that says why."""
        text = f"step {self.step:,}, rank {self.rank}: {self._what()}{self._for_samples()}."
        if self.evidence:
            evidence = "; ".join(self.evidence)
            text += f" {evidence[0].upper()}{evidence[1:]}."
        return text

    def _what(self) -> str:
        number_format = _FORMATS.get(self.dtype, self.dtype)
        values = self.values
        where = f"the {number_format} {self.direction}"
        match self.direction, self.kind:
            case "update", _:
                return f"the update makes `{self.layer}` {values}"
            case "backward", "parameter":
                return f"the gradient of `{self.layer}` is {values} in {where}"
            case "backward", "loss":
                return f"the gradient of the loss is {values}"
            case "backward", _:
                return f"the gradient that {self._maker()} makes is {values} in {where}"
            case "forward", "batch":
                return f"`{self.layer}` is {values}"
            case "forward", "loss":
                return f"the loss is {values}"
            case "forward", "input":
                maker = "the task" if self.inside is None else _named(self.inside)
                made = f"what {maker} gives to {self._name()}"
                if self.after is not None:
                    made += f" after {_named(self.after)}"
                return f"{made} is {values} in {where}"
        return f"the output of {self._name()} is {values} in {where}"

    def _name(self) -> str:
        if not self.layer:
            return f"the model ({self.type})"
        return f"`{self.layer}` ({self.type})"

    def _maker(self) -> str:
        if self.inside is None:
            return "the loss"
        return _named(self.inside)

    def _for_samples(self) -> str:
        if self.samples is None:
            if self.micro_batch is None:
                return ""
            return f", in micro-batch {self.micro_batch} ({format_count(self.num_samples, 'sample')})"
        if len(self.samples) == self.num_samples:
            return f" for all {format_count(self.num_samples, 'sample')} of micro-batch {self.micro_batch}"
        if len(self.samples) == 1:
            return f" for {_described(self.samples[0])}"
        indices = [sample.index for sample in self.samples if sample.index is not None]
        if len(indices) == len(self.samples):
            return f" for {format_count(len(indices), 'sample')}: {format_numbers(indices, max_spans=5)}"
        rows = format_numbers([sample.row for sample in self.samples], max_spans=5)
        return f" for {format_count(len(self.samples), 'sample')} of micro-batch {self.micro_batch}: rows {rows}"


def _named(module: str | None) -> str:
    if not module:
        return "the model"
    return f"`{module}`"


def _described(sample: Sample) -> str:
    if sample.index is None:
        text = f"row {sample.row} of the micro-batch"
    else:
        text = f"sample {sample.index:,}"
    if sample.length is not None:
        text += f" (length {sample.length:,})"
    return text


class StepSummary(NamedTuple):
    """What is kept of a step for longer."""

    step: int
    # By optimizer and number of the group.
    lrs: Mapping[tuple[int, int], float]
    # 2-norms over all weights, and over all gradients of this rank.
    weights: float
    gradients: float


def summary_of(sizes: StepSizes, measured: Sequence[Measured]) -> StepSummary:
    """Return the summary of a step that was measured."""
    return StepSummary(
        sizes.step,
        sizes.lrs,
        weights=_norm(measured, "weight"),
        gradients=_norm(measured, "parameter"),
    )


def _norm(measured: Iterable[Measured], kind: str) -> float:
    squares = 0.0
    for one in measured:
        if one.event.kind == kind:
            squares += one.sizes[0] * one.sizes[0] * one.event.num_values
    return math.sqrt(squares)


class Usual:
    """What is usual at each place of a model, by the steps before."""

    def __init__(self) -> None:
        # Of the finite values.
        self._largest: dict[tuple[str, str, str, int], float] = {}
        # Places that weren't finite, though the step was: masks have infinite values.
        self._not_finite: set[tuple[str, str, str, int]] = set()

    def add(self, measured: Iterable[Measured]) -> None:
        for one in measured:
            place = one.event.place
            if not one.is_finite:
                self._not_finite.add(place)
            finite = [size for size in one.sizes if math.isfinite(size)]
            self._largest[place] = max([self._largest.get(place, 0.0), *finite])

    def wrong_rows(self, one: Measured, *, factor: float) -> list[int]:
        """Return which of the sizes aren't finite, or more than `factor` times the usual ones.

        If nothing is known, as in the first step, the other samples of the micro-batch are what is usual.
        """
        place = one.event.place
        if place in self._not_finite:
            return []
        limit = self._largest.get(place, 0.0) * factor
        if limit == 0 and one.event.is_per_sample:
            finite = [size for size in one.sizes if math.isfinite(size)]
            limit = median(finite or [0.0]) * EXPLODES
        if limit == 0:
            limit = math.inf
        return [row for row, size in enumerate(one.sizes) if not size <= limit or math.isinf(size)]

    def factor(self, one: Measured) -> float | None:
        """Return how many times the usual size it has; None if nothing is known."""
        largest = self._largest.get(one.event.place)
        if not largest:
            return None
        return one.largest / largest


def first_fault(sizes: StepSizes, before: Iterable[StepSizes], *, factor: float = EXPLODES) -> Fault | None:
    """Return what went wrong first in a step; None if nothing did.

    Args:
        before: the steps before, in order.
        factor: how many times as large as usual values must be to be wrong, if they are finite.
    """
    usual = Usual()
    summaries = []
    steps = []
    for earlier in before:
        measured = earlier.measured()
        usual.add(measured)
        steps.append(measured)
        summaries.append(summary_of(earlier, measured))
    measured = sizes.measured()
    fault = None
    for position, one in enumerate(measured):
        rows = usual.wrong_rows(one, factor=factor)
        if rows:
            fault = _fault(sizes, measured, position, rows, usual=usual, factor=factor)
            break
    if fault is not None and fault.cause == "sample" and fault.values != "too large":
        # No learning rate makes the data NaN or infinite.
        return fault
    jump = rate_jump([*summaries, summary_of(sizes, measured)])
    if jump is not None:
        return _rate_fault(jump, [*steps, measured])
    return fault


def weights_leap(steps: Iterable[StepSizes]) -> bool:
    """Return True if a step made the weights several times as large: what comes after may be its consequence."""
    weights = [summary_of(sizes, sizes.measured()).weights for sizes in steps]
    return any(before > 0 and after > GROWS * before for before, after in pairwise(weights))


def _fault(
    sizes: StepSizes,
    measured: Sequence[Measured],
    position: int,
    rows: list[int],
    *,
    usual: Usual,
    factor: float,
) -> Fault:
    one = measured[position]
    event = one.event
    info = None
    samples = None
    num_samples = 0
    objectives = list(dict.fromkeys(micro_batch.objective for micro_batch in sizes.micro_batches))
    # Weights are measured at the end of the step.
    objectives_before = len(objectives)
    if event.micro_batch >= 0:
        info = sizes.micro_batches[event.micro_batch]
        objectives_before = objectives.index(info.objective)
        samples = _samples(event, rows, info, measured, usual=usual, factor=factor)
        num_samples = info.num_samples

    evidence = []
    is_some = samples is not None and len(samples) < num_samples
    cause: Cause
    if event.direction == "update":
        cause = "update"
        evidence.append("the gradients and all activations of this rank are finite")
    elif event.direction == "backward":
        cause = "gradient"
        evidence.append("the forward is as in the steps before")
    elif event.kind == "batch":
        cause = "sample"
        evidence.append("the data has these values")
    elif event.kind == "loss":
        cause = "loss"
        evidence.append("the batch and what the model returns are as in the steps before: look at the loss function")
    else:
        cause = "activation" if is_some else "layer"
        before = "its input is" if event.kind == "output" else "all values before it are"
        evidence.append(f"{before} as in the steps before")
    times = usual.factor(one)
    if times is not None and math.isfinite(times):
        evidence.append(f"that is {times:.3g} times as large as before")

    inside = event.inside
    if event.direction == "backward":
        inside = event.consumer
        if inside is None and event.inside is not None:
            inside = event.inside
    return Fault(
        step=sizes.step,
        micro_batch=None if info is None else info.number,
        objective="" if info is None else info.objective,
        direction=event.direction,
        kind=event.kind,
        layer=event.layer,
        type=event.type,
        inside=inside,
        after=event.after,
        dtype=event.dtype,
        values=_kind_of_values(one),
        cause=cause,
        num_samples=num_samples,
        samples=samples,
        evidence=evidence,
        objectives_before=objectives_before,
    )


class RateJump(NamedTuple):
    """A step in which the learning rate was out of range."""

    step: int
    # Its position among the steps.
    position: int
    evidence: str


def rate_jump(summaries: Sequence[StepSummary]) -> RateJump | None:
    """Return the first step in which the learning rate was out of range; None if it never was.

    It was if it jumped, or if an update made the weights several times as large, though the gradients weren't larger
    than before.
    """
    for position in range(1, len(summaries)):
        before = summaries[position - 1]
        after = summaries[position]
        for group, new in after.lrs.items():
            old = before.lrs.get(group, 0.0)
            if old > 0 and new > JUMPS * old:
                return RateJump(after.step, position, f"the learning rate went from {old:.3g} to {new:.3g}")
        grows = before.weights > 0 and after.weights > GROWS * before.weights
        # Before the first step no gradient is known: then they aren't large if they are about as large as the weights.
        usual = before.gradients or before.weights
        gradients_grow = not after.gradients <= JUMPS * usual
        if grows and after.lrs and not gradients_grow:
            rates = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(after.lrs.values()))
            times = after.weights / before.weights
            evidence = f"with a learning rate of {rates}, the weights became {times:.3g} times as large"
            return RateJump(after.step, position, evidence)
    return None


def _rate_fault(jump: RateJump, steps: Sequence[Sequence[Measured]]) -> Fault:
    """Return the fault of a learning rate: the weight that it changed most."""
    before = {one.event.layer: one.sizes[0] for one in steps[jump.position - 1] if one.event.kind == "weight"}
    most = None
    largest = 0.0
    for one in steps[jump.position]:
        old = before.get(one.event.layer, 0.0)
        if one.event.kind == "weight" and old > 0:
            times = one.sizes[0] / old
            # NaN, which is above any number, is never larger.
            if most is None or not times <= largest:
                most = one
                largest = times
    assert most is not None, "a model without weights has no gradients"
    return Fault(
        step=jump.step,
        micro_batch=None,
        objective="",
        direction="update",
        kind="weight",
        layer=most.event.layer,
        type="",
        inside=None,
        after=None,
        dtype=most.event.dtype,
        values=_kind_of_values(most),
        cause="learning_rate",
        num_samples=0,
        samples=None,
        evidence=[jump.evidence],
    )


def _samples(
    event: Event,
    rows: Sequence[int],
    info: MicroBatchInfo,
    measured: Sequence[Measured],
    *,
    usual: Usual,
    factor: float,
) -> list[Sample] | None:
    """Return the samples that are wrong, if the fault, or else the gradient of what the model returns, tells them."""
    if event.is_per_sample:
        return [sample_of(row, info) for row in rows]
    if event.kind != "loss":
        return None
    # A loss is one number; the gradient of what it was computed from has a row for each sample.
    for one in measured:
        other = one.event
        is_of_micro_batch = other.micro_batch == event.micro_batch
        if other.direction == "backward" and other.is_per_sample and is_of_micro_batch:
            wrong = usual.wrong_rows(one, factor=factor)
            if wrong:
                return [sample_of(row, info) for row in wrong]
    return None


def sample_of(row: int, info: MicroBatchInfo) -> Sample:
    """Return the sample in a row of a micro-batch."""
    index = None
    if info.indices is not None:
        index = int(info.indices[row])
    return Sample(index, row, _length(info.batch, row))


def _length(batch: Mapping[str, Any], row: int) -> int | None:
    """Return the length of a padded sequence, if the batch tells it: see `lengths_of`."""
    for entry in batch.values():
        if entry.ndim not in (1, 2) or row >= len(entry):
            # One mask for all samples, or one for each pair of places.
            continue
        # A mask that is added to attention's scores has 0 for tokens, and a large negative number for padding.
        is_added = entry.is_floating_point() and bool((entry <= 0).all())
        if not is_added:
            return int(entry[row].sum())
    return None


def _kind_of_values(one: Measured) -> str:
    if any(map(math.isnan, one.sizes)):
        return "NaN"
    if not any(map(math.isinf, one.sizes)):
        return "too large"
    if one.event.dtype in ("float16", "float64") or not one.event.squares:
        return "infinite"
    # Their squares are infinite in float32, in which norms are computed.
    return "infinite or above 1e19"
