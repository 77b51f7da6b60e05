"""Why two trainings depart, as far as their notes can tell: the kind of reason and what its words need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from framework.parity.comparing import BUFFERS, GRADIENTS, WEIGHTS, LayerDifference, Step, common_factor
from framework.parity.trace import ENTERED, LEFT, StepTrace

_ABOUT = 0.3


class Reason(Enum):
    """What is probably the matter, from what the first departure is."""

    START = "start"  # the weights to begin with
    INPUT_RANDOM = "input_random"  # what goes into the model, and the task drew numbers
    INPUT = "input"  # what goes into the model
    RANDOM = "random"  # a module drew numbers
    BATCH_NORM = "batch_norm"
    PAIRS = "pairs"  # a sample's output has as many values as there are samples
    MIXING = "mixing"  # a module gives a sample something else among other samples
    TASK_RANDOM = "task_random"  # the task or the loss drew numbers
    SUM = "sum"  # all gradients are one number of processes-th: the loss is a sum
    FACTOR = "factor"  # all gradients are off by one factor
    UNEVEN = "uneven"  # in a step that isn't dealt evenly, all earlier ones being the same
    UNUSED = "unused"  # a parameter has a gradient on one side only
    BACKWARD = "backward"  # some gradients only
    LOSS = "loss"  # all gradients
    REPLICAS = "replicas"  # a rank has other weights than the first
    OPTIMIZER = "optimizer"  # weights, and not their gradients
    BUFFERS = "buffers"  # buffers alone


@dataclass(frozen=True)
class Likely:
    """module: the one it is said of; None where it is of none. factor: of the gradients. names: parameters."""

    reason: Reason
    module: str | None = None
    factor: float | None = None
    names: tuple[str, ...] = ()


def likely(step: Step, one: StepTrace, many: Sequence[StepTrace], *, base: float) -> Likely:
    """What is probably the matter in the first step that departs. base: the floor of what is allowed."""
    layer = step.first_layer
    if layer is not None:
        return _of_layer(layer)
    gradients = step.departing(GRADIENTS)
    if gradients:
        return _of_gradients(step, one, many, base=base)
    weights = step.departing(WEIGHTS)
    if weights:
        names = tuple(each.name for each in weights)
        alone = all(each.rank > 0 for each in weights)
        return Likely(Reason.REPLICAS if alone else Reason.OPTIMIZER, names=names)
    return Likely(Reason.BUFFERS, names=tuple(each.name for each in step.departing(BUFFERS)))


def _of_layer(layer: LayerDifference) -> Likely:
    event = layer.event
    if event.inside is None and event.kind == ENTERED:
        return Likely(Reason.INPUT_RANDOM if layer.drew else Reason.INPUT, module=event.module)
    # What a module is given was made by the one around it.
    module = event.module if event.kind == LEFT else event.inside
    if layer.drew:
        return Likely(Reason.RANDOM, module=module)
    if event.is_batch_norm and event.kind == LEFT:
        return Likely(Reason.BATCH_NORM, module=module)
    return Likely(Reason.PAIRS if layer.has_other_shape else Reason.MIXING, module=module)


def _of_gradients(step: Step, one: StepTrace, many: Sequence[StepTrace], *, base: float) -> Likely:
    """Every module gave the same."""
    departing = step.departing(GRADIENTS)
    names = tuple(each.name for each in departing)
    if all(each.rank > 0 for each in departing):
        return Likely(Reason.REPLICAS, names=names)
    if one.drew_after or any(trace.drew_after for trace in many):
        return Likely(Reason.TASK_RANDOM)
    unused = tuple(name for name in names if _is_missing(one.gradients, name) != _is_missing(many[0].gradients, name))
    if unused:
        return Likely(Reason.UNUSED, names=unused)
    allowed = max([base, *(each.allowed for each in step.gradients if each.is_sure)])
    # Of a sum about 1 over the number of processes: not quite where their shares aren't equal.
    factor = common_factor(one.gradients, many[0].gradients, tolerance=_ABOUT)
    if factor is not None and abs(factor * len(many) - 1) <= _ABOUT:
        return Likely(Reason.SUM, factor=factor)
    factor = common_factor(one.gradients, many[0].gradients, tolerance=allowed)
    if factor is not None:
        return Likely(Reason.FACTOR, factor=factor)
    if len(names) < sum(each.is_sure and not _is_zero(one.gradients, each.name) for each in step.gradients):
        return Likely(Reason.BACKWARD, names=names)
    sizes = {len(trace.indices) for trace in many}
    return Likely(Reason.UNEVEN if len(sizes) > 1 else Reason.LOSS)


def _is_missing(gradients: Mapping[str, object], name: str) -> bool:
    return gradients.get(name) is None


def _is_zero(gradients: Mapping[str, object], name: str) -> bool:
    gradient = gradients.get(name)
    return gradient is None or not bool(gradient.any())  # type: ignore[attr-defined]
