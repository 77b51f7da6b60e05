"""How far the steps of three trainings are from each other, and how far rounding may carry them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from framework.jobs.parity.recording import POWERS, StepTrace

LAYERS = "layers"
GRADIENTS = "gradients"
WEIGHTS = "weights"
BUFFERS = "buffers"
# If so much is allowed, the value is nothing but rounding.
UNSURE = 0.5

# Times what moved weights change is allowed.
_FACTOR = 4.0
# Times what its gradient may be off by, a weight may be, too: an optimizer may enlarge small gradients.
_WEIGHTS_PER_GRADIENT = 8.0


@dataclass(frozen=True)
class Difference:
    """How far one thing is off: the norm of its difference over its own norm."""

    name: str
    difference: float
    allowed: float
    # The most that the moved weights have changed it so far.
    rounding: float
    # The one with the largest difference; 0 for layers, which are compared over all ranks.
    rank: int = 0

    @property
    def is_too_large(self) -> bool:
        return self.difference > self.allowed

    @property
    def is_sure(self) -> bool:
        """True if a mistake could be distinguished from rounding."""
        return self.allowed < UNSURE


Step = Mapping[str, Sequence[Difference]]
"""The differences of a step by part; layers in the order of the forward."""


class Tensors(NamedTuple):
    """The same tensor of all trainings; None where there is none."""

    name: str
    one: Tensor | None
    moved: Tensor | None
    # One for each rank of the training on several processes.
    many: Sequence[Tensor | None]


class Comparison:
    """Compares steps in their order, since rounding that was measured applies from then on."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._rounding = defaultdict[tuple[str, str], float](float)
        self._gradients_allowed = defaultdict[str, float](float)

    def compare_step(self, one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Step:
        """Return the differences of a step. many: of all ranks, in order."""
        # If a strategy doesn't share buffers, the first rank's are saved and evaluated.
        first_of_many = many[:1]
        return {
            LAYERS: self._compare(LAYERS, list(_layers(one, moved, many))),
            GRADIENTS: self._compare(GRADIENTS, _tensors(GRADIENTS, one, moved, many)),
            WEIGHTS: self._compare(WEIGHTS, _tensors(WEIGHTS, one, moved, many)),
            BUFFERS: self._compare(BUFFERS, _tensors(BUFFERS, one, moved, first_of_many)),
        }

    def _compare(self, part: str, compared: Sequence[Tensors]) -> list[Difference]:
        """Return the differences of one part of a step."""
        roundings = [tensor_difference(tensors.one, tensors.moved) for tensors in compared]
        usual = median(roundings or [0.0])
        differences = []
        for tensors, rounding in zip(compared, roundings, strict=True):
            name = tensors.name
            largest_rounding = max(rounding, self._rounding[part, name])
            self._rounding[part, name] = largest_rounding
            allowed = self._floor + _FACTOR * max(largest_rounding, usual)
            if part == GRADIENTS:
                self._gradients_allowed[name] = max(allowed, self._gradients_allowed[name])
            elif part == WEIGHTS:
                allowed += _WEIGHTS_PER_GRADIENT * self._gradients_allowed[name]

            amounts = [tensor_difference(tensors.one, other) for other in tensors.many]
            largest = max(amounts)
            differences.append(Difference(name, largest, allowed, largest_rounding, rank=amounts.index(largest)))
        return differences


def _tensors(part: str, one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> list[Tensors]:
    """Return the tensors of a part, which is an attribute of a StepTrace."""
    of_one: Mapping[str, Tensor] = getattr(one, part)
    of_moved: Mapping[str, Tensor] = getattr(moved, part)
    of_ranks: list[Mapping[str, Tensor]] = [getattr(trace, part) for trace in many]
    compared = []
    for name in dict.fromkeys(chain(of_one, of_moved, *of_ranks)):
        of_many = [of_rank.get(name) for of_rank in of_ranks]
        compared.append(Tensors(name, of_one.get(name), of_moved.get(name), of_many))
    return compared


def _layers(one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Iterator[Tensors]:
    """Yield what passes through modules in the order of the forward, as long as all took the same path."""
    # A rank may have no sample of a short batch.
    ranks = [trace for trace in many if trace.num_samples]
    # The p-th root of a p-th moment has the unit of the values.
    exponents = torch.tensor([1.0, *(1 / power for power in POWERS)])
    traces = (one, moved, *ranks)
    for of_one, of_moved, *of_ranks in zip(*(trace.events for trace in traces), strict=False):
        if any(event.place != of_one.place for event in (of_moved, *of_ranks)):
            return
        together = torch.stack([event.moments for event in of_ranks]).sum(dim=0)
        yield Tensors(
            of_one.module,
            (of_one.moments / one.num_samples) ** exponents,
            (of_moved.moments / one.num_samples) ** exponents,
            [(together / one.num_samples) ** exponents],
        )


def tensor_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference over the larger norm. None is a tensor of zeros."""
    if one is None:
        one = torch.zeros(())
    if other is None:
        other = torch.zeros(())
    distance = float((one - other).norm())
    if distance == 0:
        return 0.0
    return distance / max(float(one.norm()), float(other.norm()))
