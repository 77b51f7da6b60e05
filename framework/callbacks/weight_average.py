"""A copy of a model that holds an average of its weights, for the callbacks that evaluate and save one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

UpdateAverages = Callable[[list[Tensor], list[Tensor], int], None]
"""Updates averages in place, given the current values and the number of values averaged before."""


@final
class WeightAverage:
    """An average of the weights that `model` has at each `update`.

    Averages are float32, or wider if the weights are: in bfloat16 an average would never move, since the change of one
    step is lost in rounding. Before the first update the model is evaluated as it is.

    It isn't torch's `AveragedModel`, whose `update_parameters` copies a count to the GPU, and waits for that, in every
    step.

    use_buffers: average floating-point buffers too (BatchNorm's statistics); False: use the model's own buffers.
    """

    def __init__(self, model: nn.Module, *, update_averages: UpdateAverages, use_buffers: bool) -> None:
        self.num_averaged = 0
        self._model = model
        self._update_averages = update_averages
        self._use_buffers = use_buffers
        self._averaged = copy.deepcopy(model).requires_grad_(False)
        for tensor in chain(self._averaged.parameters(), self._averaged.buffers()):
            if tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize:
                tensor.data = tensor.data.float()

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights that the model has now to the average."""
        averages = []
        currents = []
        for average, current in self._pairs(self._model):
            # Integers are copied, such as BatchNorm's number of batches.
            is_inexact = average.is_floating_point() or average.is_complex()
            if self.num_averaged and is_inexact:
                averages.append(average)
                currents.append(current.to(average.dtype))
            else:
                average.copy_(current)
        if averages:
            self._update_averages(averages, currents, self.num_averaged)
        if not self._use_buffers:
            for average, current in zip(self._averaged.buffers(), self._model.buffers(), strict=True):
                average.copy_(current)
        self.num_averaged += 1

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Put the average into `model`, and afterwards the training weights back, bit for bit.

        Values are changed in place: addresses stay, which captured graphs and compiled code rely on. The extra memory
        is that of one tensor, or of the model if its format is narrower than the average's.
        """
        if self.num_averaged == 0:
            yield
            return
        pairs = list(self._pairs(model))
        same = [(weight, average) for average, weight in pairs if weight.dtype == average.dtype]
        narrow = [(weight, average) for average, weight in pairs if weight.dtype != average.dtype]
        originals = [(weight, weight.detach().clone()) for weight, _ in narrow]
        _swap(same)
        _copy(narrow)
        try:
            yield
        finally:
            _swap(same)
            _copy(originals)

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Set some of the average's buffers by their names."""
        buffers = dict(self._averaged.named_buffers())
        _copy([(buffers[name], value) for name, value in values.items()])

    def state_dict(self) -> dict[str, Any]:
        """Return the average, its live tensors, and its number of updates. Not within `swapped_in`."""
        if self.num_averaged == 0:
            return {"num_averaged": 0}
        return {"num_averaged": self.num_averaged, "average": dict(self._averaged.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Earlier checkpoints have averages in the weights' own format."""
        if state["num_averaged"]:
            self.num_averaged = state["num_averaged"]
            self._averaged.load_state_dict(state["average"])

    def _pairs(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each averaged tensor with that of `model`."""
        yield from zip(self._averaged.parameters(), model.parameters(), strict=True)
        if self._use_buffers:
            yield from zip(self._averaged.buffers(), model.buffers(), strict=True)


@torch.no_grad()
def _swap(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        value = one.detach().clone()
        one.copy_(other)
        other.copy_(value)


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, value in pairs:
        target.copy_(value)
