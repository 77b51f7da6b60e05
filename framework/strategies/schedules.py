"""A window's micro-batches through the schedules of torch.distributed.pipelining, with a task that knows nothing of it.

The task calls a model and makes a loss of what it gives. Here it is called twice: with a stand-in that takes the inputs
and goes no further, on every rank of the pipeline; and on the rank of the last stage with one that gives the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from framework.errors import TargetError
from framework.seed import host_fingerprint
from framework.strategies.relay import Passed, Relay, Shape, checked_inputs
from framework.types import Batch, MicroBatch, NumberFormats, StepOutput, Task

Weighed = Callable[[Callable[[Batch], StepOutput], MicroBatch], Tensor]
"""The weighed loss of a micro-batch, given what computes its step's output."""


class Schedule(Enum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


@final
class Schedules:
    """Runs windows. torch's schedules want all micro-batches of one size and a fixed number: one is made for each.

    Micro-batches are filled up with their last row, and the window with whole ones; the task sees the real rows only,
    so the others' gradients are zeros.
    """

    def __init__(self, relay: Relay, kind: Schedule) -> None:
        self._relay = relay
        self._kind = kind
        self._made: dict[tuple[tuple[Shape, ...], int], Any] = {}
        self._loss: Callable[[Any, Tensor], Tensor] | None = None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        number: int,
        task: Task,
        precision: NumberFormats,
        weighed: Weighed,
    ) -> None:
        """Forward and backward of the micro-batches, filled up to `number`; `weighed` is called on the last stage."""
        self._relay.wait()
        self._relay.follow_mode()
        inputs = [self._inputs_of(micro.batch, task=task, precision=precision) for micro in micro_batches]
        rows = [len(tensors[0]) for tensors in inputs]
        # Of this window alone: a resumed run, which hasn't seen those before, has to compute the same.
        most = max(rows)
        kinds = {tuple((each.shape[1:], each.dtype) for each in tensors) for tensors in inputs}
        if len(kinds) > 1:
            told = " and ".join(str([tuple(shape) for shape, _ in kind]) for kind in list(kinds)[:2])
            raise TargetError(
                f"strategy=pipeline wants samples of one shape in all micro-batches of a step, and there are {told}.\n"
                "Pad them where the dataset makes them."
            )
        shapes = tuple(Shape((most, *each.shape[1:]), each.dtype) for each in inputs[0])

        def loss(output: Any, position: Tensor) -> Tensor:
            at = int(position)
            real = at < len(micro_batches) and micro_batches[at].num_samples > 0
            seen = _first_rows(output, rows[at] if real else 0)
            if not real:
                return sum((each.sum() for each in _tensors(seen)), torch.zeros((), device=self._relay.device))
            with precision.autocast():
                return weighed(lambda batch: task.training_step(_Output(seen), batch), micro_batches[at])

        self._loss = loss
        filled = [tuple(_filled(each, most) for each in tensors) for tensors in inputs]
        filled += filled[-1:] * (number - len(filled))
        self._step(self._schedule(shapes, number, precision), filled, number=number)
        self._loss = None

    def _step(self, schedule: Any, inputs: Sequence[tuple[Tensor, ...]], *, number: int) -> None:
        whole: tuple[Tensor, ...] = ()
        if 0 in self._relay.stages:
            whole = tuple(torch.cat(column).contiguous() for column in zip(*inputs, strict=True))
        more: dict[str, Any] = {}
        if self._relay.num_stages - 1 in self._relay.stages:
            more["target"] = torch.arange(number)  # of each micro-batch, which one it is
            if "return_outputs" in inspect.signature(schedule.step).parameters:
                more["return_outputs"] = False  # nobody needs them joined
        schedule.step(*whole, **more)

    def _inputs_of(self, batch: Batch, *, task: Task, precision: NumberFormats) -> tuple[Tensor, ...]:
        """What the task calls the model with."""
        before = host_fingerprint()
        try:
            with precision.autocast():
                task.training_step(_Inputs(), batch)
        except _Taken as taken:
            inputs = checked_inputs(taken.inputs)
        else:
            raise TargetError(f"{type(task).__name__}.training_step didn't call the model, which a pipeline awaits.")
        if before != host_fingerprint():
            raise TargetError(
                f"{type(task).__name__}.training_step draws random numbers before it calls the model. With strategy="
                "pipeline it runs on several ranks, which would draw different ones: draw in the dataset or the model."
            )
        return inputs

    def _schedule(self, shapes: tuple[Shape, ...], number: int, precision: NumberFormats) -> Any:
        if (shapes, number) not in self._made:
            with precision.autocast():
                passed = self._relay.shapes(shapes)
            stages = [self._stage(index, shapes, passed, precision) for index in sorted(self._relay.stages)]
            how: dict[str, Any] = {"n_microbatches": number, "loss_fn": self._loss_now, "scale_grads": False}
            if self._kind is Schedule.INTERLEAVED:
                made: Any = ScheduleInterleaved1F1B(stages, **how)
            else:
                made = (ScheduleGPipe if self._kind is Schedule.GPIPE else Schedule1F1B)(stages[0], **how)
            self._made[shapes, number] = made
        return self._made[shapes, number]

    def _stage(self, index: int, shapes: tuple[Shape, ...], passed: list[Passed], precision: NumberFormats) -> Any:
        """With its shapes given, so that torch runs nothing to find them."""
        before = shapes if index == 0 else passed[index - 1].shapes
        return PipelineStage(
            _InPrecision(self._relay.stages[index], precision),
            index,
            self._relay.num_stages,
            self._relay.device,
            input_args=tuple(_example(each, has_gradient=index > 0) for each in before),
            output_args=tuple(_example(each, has_gradient=True) for each in passed[index].shapes),
            group=self._relay.group,
        )

    def _loss_now(self, output: Any, position: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, position)


@final
class _InPrecision(nn.Module):
    """A stage under the trainer's autocast, entered anew each time: its cache of weights is of one forward.

    What it gives lies in memory as what is received for it does.
    """

    def __init__(self, stage: nn.Module, precision: NumberFormats) -> None:
        super().__init__()
        self.stage = stage
        self._autocast: Callable[[], AbstractContextManager[Any]] = precision.autocast

    def forward(self, *inputs: Tensor) -> Any:
        with self._autocast():
            output = self.stage(*inputs)
        return output.contiguous() if isinstance(output, Tensor) else tuple(each.contiguous() for each in output)


class _Taken(BaseException):
    """Ends a task's step where it has called the model; nothing of the user's is to catch it."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class _StandIn(nn.Module):
    """In a model's place while a task computes. It can be called; where it is asked for something else it tells."""

    def __getattr__(self, name: str) -> NoReturn:
        raise TargetError(
            f"The task asks the model for `{name}`. With strategy=pipeline no rank has the whole model, and a task can "
            "only call it."
        )

    def parameters(self, recurse: bool = True) -> NoReturn:
        self.__getattr__("parameters")

    def named_parameters(self, *_: Any, **__: Any) -> NoReturn:
        self.__getattr__("named_parameters")


@final
class _Inputs(_StandIn):
    """Takes what the model is called with."""

    def forward(self, *inputs: Any, **named: Any) -> NoReturn:
        if named:
            raise TargetError(
                f"The task calls the model with {', '.join(named)}= by name. With strategy=pipeline it passes tensors "
                "by position, which the first stage takes."
            )
        raise _Taken(inputs)


@final
class _Output(_StandIn):
    """Gives what the pipeline has computed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.__dict__["given"] = [output]

    def forward(self, *_: Any, **__: Any) -> Any:
        if not self.__dict__["given"]:
            raise TargetError("The task calls the model more than once in a step, and a pipeline runs once.")
        return self.__dict__["given"].pop()


def _first_rows(output: Any, number: int) -> Any:
    if isinstance(output, Tensor):
        return output if len(output) == number else output[:number]
    return tuple(_first_rows(each, number) for each in output)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


def _filled(tensor: Tensor, rows: int) -> Tensor:
    lacking = rows - len(tensor)
    return tensor if lacking == 0 else torch.cat([tensor, tensor[-1:].expand(lacking, *tensor.shape[1:])])


def _example(shape: Shape, *, has_gradient: bool) -> Tensor:
    return shape.empty("meta").requires_grad_(has_gradient and shape.dtype.is_floating_point)
