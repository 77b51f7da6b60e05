"""Where the notes of three trainings depart beyond rounding: `one` process, one with `moved` weights, and `many`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from framework.parity.tolerance import FACTOR, floor, of_gradients
from framework.parity.trace import Event, StepTrace

LAYERS, GRADIENTS, WEIGHTS, BUFFERS = "layers", "gradients", "weights", "buffers"
PARTS = (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)
"""What is compared of a step, in the order in which one follows from the other."""

_UNSURE = 0.5  # where so much is allowed, a value is rounding and nothing else


@dataclass(frozen=True)
class Difference:
    """How far one thing is off, as a share of its size; see `tolerance`. rank: whose it is; 0 of layers, which are of
    all. rounding: the most that the moved weights have changed in it so far.
    """

    name: str
    amount: float
    allowed: float
    rounding: float
    rank: int = 0

    @property
    def departs(self) -> bool:
        return not self.amount <= self.allowed

    @property
    def is_sure(self) -> bool:
        """Whether a departure could be told from rounding."""
        return self.allowed < _UNSURE


@dataclass(frozen=True)
class LayerDifference:
    """Of what passes at an event. before: the last one before it that could be compared. drew: numbers were drawn
    between them, on either side. has_other_shape: a sample's part is of another size.
    """

    event: Event
    before: Event | None
    difference: Difference
    drew: bool
    has_other_shape: bool = False


@dataclass(frozen=True)
class Step:
    """Everything compared of one step."""

    layers: tuple[LayerDifference, ...]
    gradients: tuple[Difference, ...]
    weights: tuple[Difference, ...]
    buffers: tuple[Difference, ...]

    def differences(self, part: str) -> tuple[Difference, ...]:
        if part == LAYERS:
            return tuple(layer.difference for layer in self.layers)
        found: tuple[Difference, ...] = getattr(self, part)
        return found

    def departing(self, part: str) -> list[Difference]:
        return [each for each in self.differences(part) if each.departs]

    @property
    def first_layer(self) -> LayerDifference | None:
        """In the order of the forward."""
        return next((layer for layer in self.layers if layer.difference.departs), None)

    @property
    def is_same(self) -> bool:
        """Whether what a run leaves is: gradients, weights and buffers."""
        return not any(self.departing(part) for part in (GRADIENTS, WEIGHTS, BUFFERS))


def compare_step(
    one: StepTrace, moved: StepTrace, many: Sequence[StepTrace], *, unit: float, before: Sequence[Step] = ()
) -> Step:
    """many: the traces of all ranks, in their order. before: the steps before this one."""
    base = floor(unit)
    known = [{each.name: each for each in step.gradients} for step in before]
    gradients = _of_ranks(one, moved, many, part=GRADIENTS, before=before, base=base)
    # What gradients may be off by, weights may, and more where an optimizer makes much of small gradients.
    inherited = {
        each.name: of_gradients(unit)
        * max([each.allowed, *(step[each.name].allowed for step in known if each.name in step)])
        for each in gradients
    }
    # Weights are numbers with a rounding of their own, each step, however little they change.
    rounded = 4 * (len(before) + 2) * unit
    for name, change in one.changes.items():
        size = float(change.norm())
        inherited[name] = inherited.get(name, 0.0) + (rounded * one.norms[name] / size if size else 0.0)
    return Step(
        layers=tuple(compare_layers(one, moved, many, base=base, before=before)),
        gradients=gradients,
        weights=_of_ranks(one, moved, many, part=WEIGHTS, before=before, base=base, inherited=inherited),
        # Each rank's own where a strategy doesn't share them; what is saved and evaluated is the first's.
        buffers=_of_ranks(one, moved, many[:1], part=BUFFERS, before=before, base=base),
    )


def compare_layers(
    one: StepTrace, moved: StepTrace, many: Sequence[StepTrace], *, base: float, before: Sequence[Step] = ()
) -> Iterator[LayerDifference]:
    """What passes at each event in the order of the forward, as far as all went the same way. `base`: the floor."""
    found = list(_passages(one, moved, many))
    earlier: dict[tuple[str, str, int], float] = {}
    for layer in (layer for step in before for layer in step.layers):
        place = layer.event.place
        earlier[place] = max(earlier.get(place, 0.0), layer.difference.rounding)
    usual = median([max(rounding for _, rounding, _ in values) for _, values, _ in found] or [0.0])
    last: Event | None = None
    for event, values, drew in found:
        differences = []
        for amount, rounding, has_other_shape in values:
            carried = max(rounding, earlier.get(event.place, 0.0))
            allowed = base + FACTOR * max(carried, usual)
            differences.append((Difference(event.module, amount, allowed, carried), has_other_shape))
        worst, has_other_shape = max(differences, key=lambda each: each[0].amount - each[0].allowed)
        yield LayerDifference(event, last, worst, drew, has_other_shape)
        last = event


def _passages(
    one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]
) -> Iterator[tuple[Event, list[tuple[float, float, bool]], bool]]:
    """Each event with something to compare: of its tensors how far they are off, how far rounding carries, and whether
    they are of another size; and whether numbers were drawn since the last one.
    """
    ranks = [trace for trace in many if len(trace.indices)]  # a rank may have been given no sample of a short batch
    paths = [trace.events for trace in (one, moved, *ranks)]
    known = [events for events in paths if events is not None]
    if len(known) < len(paths) or not ranks:
        return
    orders = [torch.argsort(trace.indices) for trace in (one, moved)]
    orders.append(torch.argsort(torch.cat([trace.indices for trace in ranks])))
    drew = False
    for first, second, *others in zip(*known, strict=False):
        if any(event.place != first.place for event in (second, *others)):
            return
        drew = drew or any(event.drew for event in (first, *others))
        values = list(_passing([[first], [second], others], orders))
        if values:
            yield first, values, drew
            drew = False


def _passing(sides: Sequence[Sequence[Event]], orders: Sequence[Tensor]) -> Iterator[tuple[float, float, bool]]:
    """Of each tensor at one event: one against many, one against moved, and whether a sample's part has other sizes."""
    events = [event for side in sides for event in side]
    for place in range(min(len(event.passages) for event in events)):
        passages = [event.passages[place] for event in events]
        shared = [view for view in passages[0].views if all(view in each.views for each in passages)]
        if shared:
            rows = [
                {view: torch.cat([event.passages[place].views[view] for event in side])[order] for view in shared}
                for side, order in zip(sides, orders, strict=True)
            ]
            # Which way of reading it is the right one isn't known; a wrong one is off where nothing is.
            amount, rounding = (
                min(row_difference(rows[0][view], rows[side][view]) for view in shared) for side in (2, 1)
            )
            yield amount, rounding, False
        elif all(each.is_leading for each in passages):
            yield math.inf, 0.0, True


def row_difference(one: Tensor, other: Tensor) -> float:
    """Of the sample that is farthest off, over the root mean square of all: both (samples, k)."""
    sizes, off = _square_sums(one), _square_sums(one - other)
    scale = float(torch.maximum(sizes, _square_sums(other)).mean().sqrt())
    return 0.0 if not off.numel() or not float(off.max()) else float(off.max().sqrt()) / scale


def tensor_difference(one: Tensor | None, other: Tensor | None) -> float:
    """The norm of the difference over the greater norm. None is a tensor of zeros."""
    if one is None or other is None:
        given = one if other is None else other
        return 0.0 if given is None or not float(given.norm()) else 1.0
    if one.shape != other.shape:
        return math.inf
    off = float((one - other).norm())
    return 0.0 if not off else off / max(float(one.norm()), float(other.norm()))


def common_factor(
    one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], *, tolerance: float
) -> float | None:
    """The number that all tensors of `other` are times those of `one`, None where there is no such number."""
    pairs = [(a, b) for name, a in one.items() if a is not None and (b := other.get(name)) is not None]
    if not pairs:
        return None
    ones, others = (torch.cat(side) for side in zip(*pairs, strict=True))
    size = float(ones.square().sum())
    factor = float((ones * others).sum()) / size if size else 0.0
    return factor if factor and tensor_difference(ones * factor, others) <= tolerance else None


def _of_ranks(
    one: StepTrace,
    moved: StepTrace,
    many: Sequence[StepTrace],
    *,
    part: str,
    before: Sequence[Step],
    base: float,
    inherited: Mapping[str, float] | None = None,
) -> tuple[Difference, ...]:
    """Of each tensor, by name, the rank that is farthest off. inherited: is allowed besides."""
    values = _VALUES[part]
    roundings = {name: tensor_difference(tensor, values(moved).get(name)) for name, tensor in values(one).items()}
    usual = median(roundings.values() or [0.0])
    for each in (each for step in before for each in step.differences(part)):
        roundings[each.name] = max(roundings.get(each.name, 0.0), each.rounding)
    found = []
    for name, tensor in values(one).items():
        allowed = base + FACTOR * max(roundings[name], usual) + (inherited or {}).get(name, 0.0)
        amounts = [tensor_difference(tensor, values(trace).get(name)) for trace in many]
        amount = max(amounts)
        found.append(Difference(name, amount, allowed, roundings[name], rank=amounts.index(amount)))
    return tuple(found)


_VALUES: Mapping[str, Callable[[StepTrace], Mapping[str, Tensor | None]]] = {
    GRADIENTS: lambda trace: trace.gradients,
    WEIGHTS: lambda trace: trace.changes,
    BUFFERS: lambda trace: trace.buffers,
}


def _square_sums(rows: Tensor) -> Tensor:
    return rows.double().square().sum(dim=1)
