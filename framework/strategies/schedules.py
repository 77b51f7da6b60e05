"""A window's micro-batches through the schedules of torch.distributed.pipelining, with a task that knows nothing of it.

The task calls a model and makes a loss of what it gives. Here it is called twice: with a stand-in that takes the inputs
and goes no further, on every rank of the pipeline; and on the rank of the last stage with one that gives the output.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from framework.errors import TargetError
from framework.seed import fingerprint
from framework.strategies.relay import Passed, Relay, Shape, checked_inputs
from framework.types import Batch, MicroBatch, NumberFormats, StepOutput, Task

Weighed = Callable[[Callable[[Batch], StepOutput], MicroBatch], Tensor]
"""The weighed loss of a micro-batch, given what computes its step's output."""

_KEPT = 2  # schedules: of full windows, and of the short one that ends an epoch


class Schedule(Enum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


class Made(NamedTuple):
    """A schedule of torch's, and what it calls on this rank."""

    schedule: Any
    stages: Sequence[_Stage]


@final
class Schedules:
    """Runs windows. torch's schedules want all micro-batches of one size and a fixed number: one is made for each, and
    those used last are kept.

    Micro-batches are filled up on their way, and the window with whole ones. Stages and the task see the real rows
    only: what fills up has no gradient, and no part in BatchNorm's statistics.
    """

    def __init__(self, relay: Relay, kind: Schedule) -> None:
        self._relay = relay
        self._kind = kind
        self._made: OrderedDict[tuple[tuple[Shape, ...], int], Made] = OrderedDict()
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
        real = [here if micro.num_samples else 0 for here, micro in zip(rows, micro_batches, strict=True)]
        real += [0] * (number - len(real))

        def loss(output: Any, position: Tensor) -> Tensor:
            at = int(position)
            seen = _first_rows(output, real[at])
            if not real[at]:
                return sum((each.sum() for each in _tensors(seen)), torch.zeros((), device=self._relay.device))
            with precision.autocast():
                return weighed(lambda batch: task.training_step(_Output(seen), batch), micro_batches[at])

        self._loss = loss
        filled = [tuple(_filled(each, most) for each in tensors) for tensors in inputs]
        filled += filled[-1:] * (number - len(filled))
        made = self._schedule(shapes, number, precision)
        for stage in made.stages:
            stage.begin(real)
        self._step(made.schedule, filled, number=number)
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
        before = fingerprint([self._relay.device])
        try:
            with precision.autocast():
                task.training_step(_Inputs(), batch)
        except _Taken as taken:
            inputs = checked_inputs(taken.inputs)
        else:
            raise TargetError(f"{type(task).__name__}.training_step didn't call the model, which a pipeline awaits.")
        if before != fingerprint([self._relay.device]):
            raise TargetError(
                f"{type(task).__name__}.training_step draws random numbers before it calls the model. With strategy="
                "pipeline it runs on several ranks, which would draw different ones: draw in the dataset or the model."
            )
        return inputs

    def _schedule(self, shapes: tuple[Shape, ...], number: int, precision: NumberFormats) -> Made:
        if (shapes, number) not in self._made:
            with precision.autocast():
                passed = self._relay.shapes(shapes)
            own = {index: _Stage(self._relay.stages[index], precision, passed[index]) for index in self._relay.stages}
            stages = [self._placed(own[index], index, shapes, passed) for index in sorted(own)]
            how: dict[str, Any] = {"n_microbatches": number, "loss_fn": self._loss_now, "scale_grads": False}
            if self._kind is Schedule.INTERLEAVED:
                schedule: Any = ScheduleInterleaved1F1B(stages, **how)
            else:
                schedule = (ScheduleGPipe if self._kind is Schedule.GPIPE else Schedule1F1B)(stages[0], **how)
            self._made[shapes, number] = Made(schedule, list(own.values()))
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end((shapes, number))
        return self._made[shapes, number]

    def _placed(self, stage: _Stage, index: int, shapes: tuple[Shape, ...], passed: list[Passed]) -> Any:
        """With its shapes given, so that torch runs nothing to find them."""
        before = shapes if index == 0 else passed[index - 1].shapes
        return PipelineStage(
            stage,
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
class _Stage(nn.Module):
    """A stage under the trainer's autocast, entered anew each time: its cache of weights is of one forward.

    It computes the real rows of each micro-batch, and what it gives is filled up again; of one without any it computes
    nothing. What it gives lies in memory as what is received for it does. gives: for a whole micro-batch.
    """

    def __init__(self, stage: nn.Module, precision: NumberFormats, gives: Passed) -> None:
        super().__init__()
        self.stage = stage
        self._autocast: Callable[[], AbstractContextManager[Any]] = precision.autocast
        self._gives = gives
        self._rows: Iterator[int] = iter(())

    def begin(self, rows: Iterable[int]) -> None:
        """A window: how many rows of each micro-batch are real, in the order in which every schedule takes them."""
        self._rows = iter(rows)

    def forward(self, *inputs: Tensor) -> Any:
        rows, most = next(self._rows), len(inputs[0])
        if rows == 0:
            outputs = self._nothing(inputs)
        else:
            with self._autocast():
                output = self.stage(*(_first_rows(each, rows) for each in inputs))
            outputs = tuple(_with_zeros(each, most).contiguous() for each in _tensors(output))
        return outputs if self._gives.is_tuple else outputs[0]

    def _nothing(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Zeros, through which a backward comes to the inputs."""
        device = inputs[0].device
        way = sum((each.sum() for each in inputs if each.requires_grad), torch.zeros((), device=device))
        zeros = tuple(shape.zeros(device) for shape in self._gives.shapes)
        if way.requires_grad:
            return tuple(each + (0 * way).to(each.dtype) if each.is_floating_point() else each for each in zeros)
        return tuple(each.requires_grad_(each.is_floating_point()) for each in zeros)


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


def _with_zeros(tensor: Tensor, rows: int) -> Tensor:
    lacking = rows - len(tensor)
    return tensor if lacking == 0 else torch.cat([tensor, tensor.new_zeros(lacking, *tensor.shape[1:])])


def _example(shape: Shape, *, has_gradient: bool) -> Tensor:
    return shape.empty("meta").requires_grad_(has_gradient and shape.dtype.is_floating_point)
