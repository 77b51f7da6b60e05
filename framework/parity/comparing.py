"""Where the notes of three trainings depart beyond rounding: `one` process, one with `moved` weights, and `many`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.parity.tolerance import FACTOR, change_floor, floor
from framework.parity.trace import Event, StepTrace

LAYERS, GRADIENTS, WEIGHTS, BUFFERS = "layers", "gradients", "weights", "buffers"
PARTS = (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)
"""What is compared of a step, in the order in which one follows from the other."""

_UNSURE = 0.5  # where so much is allowed, a value is rounding and nothing else


@dataclass(frozen=True)
class Difference:
    """How far one thing is off, as a share of its size; see `tolerance`. rank: whose it is; 0 of layers, which are of
    all. rounding: what the moved weights changed.
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
    """Everything compared of one step. num_events: how many of `one`; num_compared of them had something to compare."""

    layers: tuple[LayerDifference, ...]
    gradients: tuple[Difference, ...]
    weights: tuple[Difference, ...]
    buffers: tuple[Difference, ...]
    num_events: int = 0

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


def compare_step(one: StepTrace, moved: StepTrace, many: Sequence[StepTrace], *, unit: float, step: int) -> Step:
    """many: the traces of all ranks, in their order."""
    base = floor(unit)
    return Step(
        layers=tuple(compare_layers(one, moved, many, base=base)),
        gradients=tuple(_of_ranks(one, moved, many, values=_gradients, base=base)),
        weights=tuple(
            # Weights are numbers with a rounding of their own, each step, however little they change.
            _of_ranks(one, moved, many, values=_changes, base=change_floor(unit), rounded=4 * (step + 1) * unit)
        ),
        # Each rank's own where a strategy doesn't share them; what is saved and evaluated is the first's.
        buffers=tuple(_of_ranks(one, moved, many[:1], values=_buffers, base=base)),
        num_events=len(one.events or ()),
    )


def compare_layers(
    one: StepTrace, moved: StepTrace, many: Sequence[StepTrace], *, base: float
) -> Iterator[LayerDifference]:
    """What passes at each event in the order of the forward, as far as all went the same way. `base`: the floor."""
    ranks = [trace for trace in many if len(trace.indices)]  # a rank may have been given no sample of a short batch
    paths = [trace.events for trace in (one, moved, *ranks)]
    known = [events for events in paths if events is not None]
    if len(known) < len(paths) or not ranks:
        return
    orders = [torch.argsort(trace.indices) for trace in (one, moved)]
    orders.append(torch.argsort(torch.cat([trace.indices for trace in ranks])))
    before: Event | None = None
    drew = False
    for first, second, *others in zip(*known, strict=False):
        if any(event.place != first.place for event in (second, *others)):
            return
        drew = drew or any(event.drew for event in (first, *others))
        sides = [[first], [second], others]
        found = list(_passing(sides, orders, base=base))
        if found:
            worst, has_other_shape = max(found, key=lambda each: each[0].amount - each[0].allowed)
            yield LayerDifference(first, before, worst, drew, has_other_shape)
            before, drew = first, False


def _passing(
    sides: Sequence[Sequence[Event]], orders: Sequence[Tensor], *, base: float
) -> Iterator[tuple[Difference, bool]]:
    """Of each tensor at one event its difference, and whether a sample's part is of another size on the two sides."""
    name = sides[0][0].module
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
            yield Difference(name, amount, base + FACTOR * rounding, rounding), False
        elif all(each.is_leading for each in passages):
            yield Difference(name, float("inf"), base, 0.0), True


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
        return float("inf")
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
    values: Callable[[StepTrace], Mapping[str, Tensor | None]],
    base: float,
    rounded: float = 0.0,
) -> Iterator[Difference]:
    """Of each tensor, by name, the rank that is farthest off. rounded: times a weight's norm, is allowed besides."""
    for name, tensor in values(one).items():
        rounding = tensor_difference(tensor, values(moved).get(name))
        allowed = base + FACTOR * rounding
        if rounded and tensor is not None:
            size = float(tensor.norm())
            allowed += rounded * one.norms[name] / size if size else 0.0
        amounts = [tensor_difference(tensor, values(trace).get(name)) for trace in many]
        amount = max(amounts)
        yield Difference(name, amount, allowed, rounding, rank=amounts.index(amount))


def _gradients(trace: StepTrace) -> Mapping[str, Tensor | None]:
    return trace.gradients


def _changes(trace: StepTrace) -> Mapping[str, Tensor | None]:
    return trace.changes


def _buffers(trace: StepTrace) -> Mapping[str, Tensor | None]:
    return trace.buffers


def _square_sums(rows: Tensor) -> Tensor:
    return rows.double().square().sum(dim=1)
