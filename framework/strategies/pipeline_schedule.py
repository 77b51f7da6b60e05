"""Run a step's micro-batches through the schedules of torch.distributed.pipelining, with a task that knows no stages.

A task calls a model and computes a loss from its output. Here it is called twice: on every rank of the pipeline with a
stand-in for the model that records the inputs and stops, and on the last stage's rank with one that returns the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from framework.distributed.seed import fingerprint
from framework.errors import TargetError
from framework.strategies.pipeline_stages import LocalStages, Shapes, as_tuple, check_inputs, on_meta
from framework.types import Batch, MicroBatch, NumberFormats, StepOutput, Task

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


@final
class WindowRunner:
    """Runs forward and backward of windows, the micro-batches of one step.

    Torch's schedules need a fixed number of micro-batches of one size: so micro-batches are padded with rows, and the
    window with micro-batches. Stages and the task see the real rows only: padding gets no gradient, and doesn't count
    in BatchNorm's statistics.
    """

    def __init__(self, local: LocalStages, schedule: str) -> None:
        self._local = local
        self._kind = SCHEDULES[schedule]
        # Of full windows, and of the short one that ends an epoch.
        self._schedule = lru_cache(maxsize=2)(self._make_schedule)
        self._loss: Callable[[Any, Tensor], Tensor] | None = None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        number: int,
        task: Task,
        precision: NumberFormats,
        weighted_loss: Callable[[StepOutput, MicroBatch], Tensor],
    ) -> None:
        """Run the micro-batches, padded to `number`; `weighted_loss` is called on the last stage's rank."""
        self._local.sync_training_mode()
        inputs = [self._inputs_of(micro.batch, task=task, precision=precision) for micro in micro_batches]
        # The largest of this window, not of those before, which a resumed run hasn't seen.
        num_rows = max(len(tensors[0]) for tensors in inputs)
        shapes = tuple(((num_rows, *each.shape[1:]), each.dtype) for each in inputs[0])
        real_rows = [
            len(tensors[0]) if micro.num_samples else 0 for tensors, micro in zip(inputs, micro_batches, strict=True)
        ]
        real_rows += [0] * (number - len(real_rows))

        def loss(output: Any, position: Tensor) -> Tensor:
            index = int(position)
            real = _first_rows(output, real_rows[index])
            if not real_rows[index]:
                return sum((each.sum() for each in as_tuple(real)), torch.zeros((), device=self._local.device))
            model: Any = _ModelStandIn(output=real)
            with precision.autocast():
                step_output = task.training_step(model, micro_batches[index].batch)
            return weighted_loss(step_output, micro_batches[index])

        self._loss = loss
        schedule, stages = self._schedule(shapes, number, precision)  # type: ignore[arg-type]  # hashed by identity
        for stage in stages:
            stage.real_rows = iter(real_rows)
        args: tuple[Tensor, ...] = ()
        if 0 in self._local.stages:
            padded = [[_padded(each, num_rows) for each in tensors] for tensors in inputs]
            padded += padded[-1:] * (number - len(padded))
            args = tuple(torch.cat(column) for column in zip(*padded, strict=True))
        has_loss = self._local.num_stages - 1 in self._local.stages
        position = torch.arange(number) if has_loss else None
        schedule.step(*args, target=position, return_outputs=False)
        self._loss = None

    def _inputs_of(self, batch: Batch, *, task: Task, precision: NumberFormats) -> tuple[Tensor, ...]:
        """Return what the task calls the model with."""
        before = fingerprint([self._local.device])
        try:
            with precision.autocast():
                model: Any = _ModelStandIn()
                task.training_step(model, batch)
        except _Recorded as recorded:
            inputs = check_inputs(recorded.args)
        else:
            raise TargetError(f"{type(task).__name__}.training_step didn't call the model, which a pipeline needs.")
        if before != fingerprint([self._local.device]):
            raise TargetError(
                f"{type(task).__name__}.training_step draws random numbers before it calls the model. With strategy="
                "pipeline it runs on several ranks, which would draw different ones: draw in the dataset or the model."
            )
        return inputs

    def _make_schedule(self, shapes: Shapes, number: int, precision: NumberFormats) -> tuple[Any, list[_PaddedStage]]:
        with precision.autocast():
            examples = [on_meta(shapes), *self._local.example_outputs(shapes)]  # of the first stage's inputs first
        stages: list[_PaddedStage] = []
        placed: list[PipelineStage] = []
        for index, stage in self._local.stages.items():
            before, after = examples[index : index + 2]
            stages.append(_PaddedStage(stage, precision, after))
            placed.append(
                PipelineStage(
                    stages[-1],
                    index,
                    self._local.num_stages,
                    self._local.device,
                    # With these, torch runs nothing to find the shapes.
                    input_args=_examples(before, have_gradients=index > 0),
                    output_args=_examples(after, have_gradients=True),
                    group=self._local.group,
                )
            )
        schedule = self._kind(
            placed if self._kind is ScheduleInterleaved1F1B else placed[0],
            n_microbatches=number,
            loss_fn=self._current_loss,
            scale_grads=False,
        )
        return schedule, stages

    def _current_loss(self, output: Any, position: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, position)


@final
class _PaddedStage(nn.Module):
    """A stage that computes the real rows of each micro-batch only, and pads its output with zeros.

    The trainer's autocast is entered for each micro-batch: its cache of weights is of one forward. The output is
    contiguous, as what is received for it is. example: the output of a whole micro-batch, on the meta device.
    """

    def __init__(self, stage: nn.Module, precision: NumberFormats, example: Tensor | tuple[Tensor, ...]) -> None:
        super().__init__()
        self.stage = stage
        # How many rows of each micro-batch of a window are real, in the order in which every schedule takes them.
        self.real_rows: Iterator[int] = iter(())
        self._precision = precision
        self._example = example

    def forward(self, *inputs: Tensor) -> Any:
        number = next(self.real_rows)
        if number == 0:
            outputs = self._zeros(inputs)
        else:
            with self._precision.autocast():
                output = self.stage(*(_first_rows(each, number) for each in inputs))
            outputs = tuple(_padded(each, len(inputs[0])).contiguous() for each in as_tuple(output))
        return outputs[0] if isinstance(self._example, Tensor) else outputs

    def _zeros(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return zeros that a backward passes through to the inputs."""
        device = inputs[0].device
        leaf = torch.zeros((), device=device, requires_grad=True)  # the first stage's inputs need no gradient
        path = sum((each.sum() for each in inputs if each.requires_grad), leaf)
        zeros = (torch.zeros_like(each, device=device) for each in as_tuple(self._example))
        return tuple(each + (0 * path).to(each.dtype) if each.is_floating_point() else each for each in zeros)


class _Recorded(BaseException):
    """Ends a task's step when it has called the model. A BaseException, so that the task doesn't catch it."""


@final
class _ModelStandIn:
    """Takes the model's place while a task computes. It can be called once; anything else is an error.

    output: What the call returns; None raises _Recorded with the inputs.
    """

    training = True

    def __init__(self, output: Any = None) -> None:
        self._output = output
        self._is_called = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            raise TargetError(
                f"The task calls the model with {', '.join(named)}= by name. With strategy=pipeline it passes tensors "
                "by position, which the first stage takes."
            )
        if self._output is None:
            raise _Recorded(*inputs)
        if self._is_called:
            raise TargetError("The task calls the model more than once in a step, and a pipeline runs once.")
        self._is_called = True
        return self._output

    def __getattr__(self, name: str) -> NoReturn:
        raise TargetError(
            f"The task asks the model for `{name}`. With strategy=pipeline no rank has the whole model, and a task can "
            "only call it."
        )


def _first_rows(output: Any, number: int) -> Any:
    if isinstance(output, Tensor):
        return output if len(output) == number else output[:number]
    return tuple(_first_rows(each, number) for each in output)


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - len(tensor)
    return tensor if missing == 0 else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _examples(outputs: Tensor | tuple[Tensor, ...], *, have_gradients: bool) -> tuple[Tensor, ...]:
    return tuple(
        each.detach().requires_grad_(have_gradients and each.is_floating_point()) for each in as_tuple(outputs)
    )
