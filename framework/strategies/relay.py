"""Stages on several ranks that pass tensors on: their shapes, found once, and a forward for evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.errors import TargetError

_MOST_UNDER_WAY = 8  # sends of batches that others have yet to take


class Shape(NamedTuple):
    """Of one tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)


class Passed(NamedTuple):
    """What one stage gives the next: one tensor, or a tuple of them."""

    shapes: tuple[Shape, ...]
    is_tuple: bool


@final
class Relay:
    """stages: this rank's of `model`, by number; group: of the ranks of one pipeline, with stage s on rank s mod its
    size.

    The schedules of torch.distributed.pipelining want shapes that never change; evaluation's batches come as they are,
    so their forward is one of our own.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, nn.Module],
        *,
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages = stages
        self.num_stages = num_stages
        self.group = group
        self.device = device
        self._model = model
        within = set(model.modules())
        self._around = [each for stage in stages.values() for each in stage.modules() if each not in within]
        self._size = dist.get_world_size(group)
        self._known: dict[tuple[Shape, ...], list[Passed]] = {}
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def forward(self, *inputs: Any) -> Any:
        """The model's output on the rank with the last stage, zeros of its shape on the others.

        Without gradients only; every rank of the pipeline must call it with inputs of the same shapes. A rank goes on
        as soon as its own stages are done.
        """
        if torch.is_grad_enabled():
            raise TargetError(
                "strategy=pipeline was asked for a forward with gradients outside of a training step. Whoever calls "
                "the model for something else does so in torch.no_grad(), on every rank."
            )
        self.follow_mode()
        given = checked_inputs(inputs)
        passed = self.shapes(tuple(Shape(tuple(each.shape), each.dtype) for each in given))
        hidden = given
        for number in range(self.num_stages):
            if number not in self.stages:
                continue
            if number > 0 and number - 1 not in self.stages:
                hidden = self._receive(passed[number - 1], place=(number - 1) % self._size)
            hidden, _ = _normalised(self.stages[number](*hidden))
            if number + 1 < self.num_stages and number + 1 not in self.stages:
                self._send(hidden, place=(number + 1) % self._size)
        last = passed[-1]
        if self.num_stages - 1 not in self.stages:
            hidden = tuple(shape.zeros(self.device) for shape in last.shapes)
        return hidden if last.is_tuple else hidden[0]

    def shapes(self, inputs: tuple[Shape, ...]) -> list[Passed]:
        """What each stage gives for such inputs, found by a forward of zeros the first time.

        Every rank of the pipeline must call it. Modules are in eval mode meanwhile, generators stay where they are.
        """
        if inputs not in self._known:
            devices = [] if self.device.type == "cpu" else [self.device]
            with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=self.device.type):
                self._known[inputs] = self._probe(inputs)
        return self._known[inputs]

    def follow_mode(self) -> None:
        """Put modules that stages have around the model's own into its mode, of training or evaluation."""
        for module in self._around:
            module.training = self._model.training

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile this rank's stages, each by itself."""
        for stage in self.stages.values():
            stage.compile(*args, **options)

    def wait(self) -> None:
        """Until all that was sent has been taken."""
        while self._under_way:
            self._under_way.popleft()[0].wait()

    def _probe(self, inputs: tuple[Shape, ...]) -> list[Passed]:
        passed: list[Passed] = []
        shapes = inputs
        for number in range(self.num_stages):
            found: list[Any] = [None]
            if number in self.stages:
                stage = self.stages[number]
                training = [module for module in stage.modules() if module.training]
                stage.eval()
                outputs, is_tuple = _normalised(stage(*(shape.zeros(self.device) for shape in shapes)))
                for module in training:
                    module.training = True
                found = [Passed(tuple(Shape(tuple(each.shape), each.dtype) for each in outputs), is_tuple)]
            dist.broadcast_object_list(found, group=self.group, group_src=number % self._size)
            passed.append(found[0])
            shapes = passed[-1].shapes
        return passed

    def _send(self, tensors: Sequence[Tensor], *, place: int) -> None:
        for tensor in tensors:
            sent = tensor.contiguous()
            work = dist.isend(sent, group=self.group, group_dst=place)
            assert work is not None
            self._under_way.append((work, sent))
        while len(self._under_way) > _MOST_UNDER_WAY:
            self._under_way.popleft()[0].wait()

    def _receive(self, passed: Passed, *, place: int) -> tuple[Tensor, ...]:
        tensors = tuple(shape.empty(self.device) for shape in passed.shapes)
        for tensor in tensors:
            dist.recv(tensor, group=self.group, group_src=place)
        return tensors


def checked_inputs(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Raises TargetError unless all are tensors, of as many samples."""
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.ndim else None for each in inputs}
    if not inputs or None in sizes or len(sizes) > 1:
        told = ", ".join(
            f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            for each in inputs
        )
        raise TargetError(
            f"strategy=pipeline calls the model with tensors whose first dimension is the sample, and the task gave "
            f"{told or 'nothing'}."
        )
    return tuple(inputs)


def _normalised(output: Any) -> tuple[tuple[Tensor, ...], bool]:
    if isinstance(output, Tensor):
        return (output,), False
    if isinstance(output, (tuple, list)) and output and all(isinstance(each, Tensor) for each in output):
        return tuple(output), True
    raise TargetError(
        f"A stage of a pipeline must give a tensor or a tuple of tensors, and one gave a {type(output).__name__}."
    )
