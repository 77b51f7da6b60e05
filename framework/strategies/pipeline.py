"""torch.distributed.pipelining: stages of a model, on several ranks, work on different micro-batches at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from framework.config.schema import Precision
from framework.distributed.collectives import broadcast_object
from framework.distributed.context import Context
from framework.distributed.process_group import new_subgroup
from framework.distributed.seed import fingerprint
from framework.distributed.sharded import StageLayout, set_layout
from framework.errors import ConfigError, TargetError
from framework.monitoring.rank_status import RankPhase
from framework.strategies.averaging import MB, average_gradients, begin_all_reduce_mean, broadcast
from framework.strategies.base import Strategy, StrategyCosts
from framework.strategies.parameters import check_dense, check_same_change
from framework.strategies.pipeline_rules import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    PipelineRules,
    check_pipeline_precision,
    check_several_processes,
    pipeline_size,
    resolve_microbatches,
)
from framework.strategies.pipeline_stages import check_trained, drop_other_stages, split_into_stages
from framework.strategies.rules import check_gpus_are_connected, check_one_device
from framework.types import Batch, DataShare, MicroBatch, NumberFormats, StepOutput, Task, Window

_SCHEDULES: dict[str, Any] = {
    GPIPE: ScheduleGPipe,
    ONE_F_ONE_B: Schedule1F1B,
    INTERLEAVED: ScheduleInterleaved1F1B,
}

# Shapes and types of the tensors that the model takes.
_Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@final
class Pipeline(Strategy):
    """Split the model into stages on P ranks, through which micro-batches pass by torch.distributed.pipelining.

    P = `num_stages` / `stages_per_rank`; with more ranks there are several pipelines, copies of the model, whose
    gradients are averaged. Stage s is on position s mod P of its pipeline. With R copies, rank = position · R + copy:
    ranks that average the gradients of the same stages are neighbours, since those are larger than what passes between
    stages.

    Micro-batches of a window are padded to the same size, as the schedules need. Each rank of a pipeline loads the
    same batches. The task runs on the last stage's rank, and on the others until it calls the model: it must call the
    model once, with tensors whose first dimension is the sample.

    Args:
        num_stages: null: all ranks make one pipeline.
        schedule: `gpipe` does all forwards, then all backwards; `1f1b` as few forwards ahead as keep every rank busy,
            which keeps fewer activations; `interleaved` is 1f1b with several stages on each rank.
        stages_per_rank: null: 1, interleaved 2.
        num_microbatches: How many micro-batches a batch of one copy is split into; null: 4 for each rank of a pipeline.
        bucket_cap_mb: Gradients are averaged over copies in flat tensors of at most this many MiB.

    Raises ConfigError and TopologyError for numbers that don't go together.
    """

    rules = PipelineRules
    forward_communicates = True

    def __init__(
        self,
        *,
        context: Context,
        num_stages: int | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        num_microbatches: int | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        topology = context.topology
        check_one_device(topology, option="strategy=pipeline")
        check_gpus_are_connected(topology, context.backend, option="strategy=pipeline")
        self._schedule = schedule
        size = pipeline_size(
            schedule=schedule, num_stages=num_stages, stages_per_rank=stages_per_rank, topology=topology
        )
        self.num_stages: int = size.stages
        self._ranks = size.ranks
        self._num_microbatches = resolve_microbatches(num_microbatches, ranks=size.ranks)
        self._context = context
        self._position, copy = divmod(context.rank, size.copies)
        self.shard_index = self._position
        self._share = size.data_share(copy, self._num_microbatches)
        self._cap_bytes = bucket_cap_mb * MB
        # The ranks with the same stages, if there are several copies, and the ranks of this rank's pipeline.
        self._copies_group: dist.ProcessGroup | None = None
        self._pipeline_group: dist.ProcessGroup | None = None
        # The stages of this rank, by index.
        self._stages: dict[int, nn.Module] = {}
        # Modules that stages have around the model's own.
        self._wrappers: list[nn.Module] = []
        self._examples_for = cache(self._find_examples)
        # Two schedules are kept: that of full windows, and that of the short one that ends an epoch.
        self._schedule_for = lru_cache(maxsize=2)(self._make_schedule)
        # The loss function of the current window.
        self._loss: Any = None

    def data_share(self, context: Context) -> DataShare:
        return self._share

    def costs(self) -> StrategyCosts:
        is_split = self._context.world_size > 1
        num_shards = self._ranks if is_split else 1
        # Only several pipelines exchange gradients.
        has_copies = self._share.world_size > 1
        return StrategyCosts(num_shards=num_shards, copies_gradients=has_copies)

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss."""
        check_pipeline_precision(precision)

    def allow_unused_parameters(self) -> None:
        """Raise ConfigError: every stage takes part in every backward."""
        raise ConfigError(
            "strategy=pipeline can't go with a task that has objectives: its stages run one forward and backward in "
            "each step.\nUse strategy=ddp, or fsdp for a model that is too large for one device."
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the same module without other ranks' parameters, on its device: make the optimizer after it.

        Calling it passes a batch through all stages, in evaluation only. Raises ConfigError and TargetError for a model
        that can't be split, TopologyError for a single process.
        """
        context = self._context
        copies = self._share.world_size
        check_several_processes(context.topology)
        if copies > 1:
            check_dense(model, strategy="pipeline")

        # Keep this rank's stages.
        stages = split_into_stages(model, self.num_stages)
        self._stages = {index: stages[index] for index in range(self._position, self.num_stages, self._ranks)}
        modules_of_model = set(model.modules())
        self._wrappers = []
        for stage in self._stages.values():
            self._wrappers += [module for module in stage.modules() if module not in modules_of_model]
        # The layout is that of the whole model, so it is taken before the other stages are dropped.
        set_layout(model, self._layout_of_whole(model))
        drop_other_stages(model, self._stages.values())
        model.to(context.device)

        # Connect it with the ranks of its pipeline, and with those that have the same stages.
        pipelines = [range(copy, context.world_size, copies) for copy in range(copies)]
        self._pipeline_group = new_subgroup(pipelines, context)
        self.groups = [self._pipeline_group]
        if copies > 1:
            first_copies = range(0, context.world_size, copies)
            same_stages = [range(first, first + copies) for first in first_copies]
            self._copies_group = new_subgroup(same_stages, context)
            self.groups = [self._pipeline_group, self._copies_group]
            broadcast([*model.parameters(), *model.buffers()], group=self._copies_group)

        model.forward = partial(self._forward, model)
        model.compile = self._compile  # type: ignore[method-assign]
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Called only by ranks with a parameter that changed in their stages.

        Raises ConfigError for a stage without a parameter to train, through which no backward would pass.
        """
        check_trained(self._stages, num_stages=self.num_stages)
        if self._copies_group is not None:
            check_same_change(changed, self._context, group=self._copies_group)
        return model

    def before_evaluation(self, model: nn.Module) -> None:
        """Give all copies the first one's buffers."""
        self._share_buffers(model)

    def run_window(
        self,
        model: nn.Module,
        window: Window,
        *,
        task: Task,
        precision: NumberFormats,
        add: Callable[[StepOutput, int, float], Tensor],
        mark: Callable[[RankPhase], None],
    ) -> Tensor:
        """Run forward and backward of all micro-batches; gradients are then the mean over the global batch."""
        device = self._context.device
        micro_batches = [MicroBatch(precision.convert_batch(batch), count) for batch, count in window.micro_batches]
        # Forwards and backwards alternate. All of it counts as backward, the phase in which ranks wait for each other.
        mark(RankPhase.FORWARD)
        mark(RankPhase.BACKWARD)
        self._share_buffers(model)
        self._sync_training_mode(model)

        # Torch's schedules need a fixed number of micro-batches of one size. So micro-batches are padded with rows, and
        # the window with micro-batches. Stages and the task see only the real rows: padding gets no gradient, and
        # doesn't count in BatchNorm's statistics.
        num_microbatches = math.ceil(len(micro_batches) / self._num_microbatches) * self._num_microbatches
        inputs = [_inputs_of(micro.batch, task=task, precision=precision, device=device) for micro in micro_batches]
        # The largest of this window, not of those before, which a resumed run hasn't seen.
        num_rows = max(len(tensors[0]) for tensors in inputs)
        shapes = tuple(((num_rows, *tensor.shape[1:]), tensor.dtype) for tensor in inputs[0])
        real_rows = [0] * num_microbatches
        for index, micro in enumerate(micro_batches):
            # A micro-batch without samples is a stand-in, which has rows.
            if micro.num_samples:
                real_rows[index] = len(inputs[index][0])

        scale = self._share.world_size / window.global_count
        # The loss of the last micro-batch; it stays 0 except on the rank with the last stage.
        last_loss = torch.zeros((), device=device)

        def weighted_loss(output: Any, position: Tensor) -> Tensor:
            """Return the loss of the micro-batch at this position, given the last stage's output for it."""
            nonlocal last_loss
            index = int(position)
            real_output = _first_rows(output, real_rows[index])
            if real_rows[index] == 0:
                # Zero, and a backward passes through it to the stages.
                return sum((tensor.sum() for tensor in _as_tuple(real_output)), torch.zeros((), device=device))
            stand_in: Any = _ModelStandIn(output=real_output)
            with precision.autocast():
                step_output = task.training_step(stand_in, micro_batches[index].batch)
            # In the type in which the other ranks receive it.
            last_loss = step_output.loss.detach().float()
            return add(step_output, micro_batches[index].num_samples, scale)

        # The schedule is cached by the identity of `precision`.
        schedule, stages = self._schedule_for(shapes, num_microbatches, precision)  # type: ignore[arg-type]
        for stage in stages:
            stage.real_rows = iter(real_rows)
        first_inputs: tuple[Tensor, ...] = ()
        if self._has_first_stage():
            first_inputs = _padded_window(inputs, num_rows=num_rows, num_microbatches=num_microbatches)
        positions = None
        if self._has_last_stage():
            positions = torch.arange(num_microbatches)
        self._loss = weighted_loss
        schedule.step(*first_inputs, target=positions, return_outputs=False)
        self._loss = None

        if self._copies_group is not None:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            begin_mean = partial(begin_all_reduce_mean, group=self._copies_group)
            average_gradients(trained, cap_bytes=self._cap_bytes, begin_mean=begin_mean)
        # Give the last stage's loss to every rank of the pipeline.
        dist.broadcast(last_loss, group=self._pipeline_group, group_src=self._rank_of(self.num_stages - 1))
        return last_loss

    @torch.no_grad()
    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all stages' gradients, given that of this rank's. Every rank must call it."""
        square = norm.to(device=self._context.device, dtype=torch.float64).square()
        dist.all_reduce(square, group=self._pipeline_group)
        return square.sqrt().to(norm.dtype)

    def _layout_of_whole(self, model: nn.Module) -> StageLayout:
        return StageLayout(
            names=frozenset(model.state_dict()),
            parameters=tuple(name for name, _ in model.named_parameters()),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            writes=self._share.rank == 0,
            has_output=self._has_last_stage(),
        )

    def _has_first_stage(self) -> bool:
        return 0 in self._stages

    def _has_last_stage(self) -> bool:
        return self.num_stages - 1 in self._stages

    def _rank_of(self, stage: int) -> int:
        """Return which rank of the pipeline has this stage."""
        return stage % self._ranks

    def _share_buffers(self, model: nn.Module) -> None:
        if self._copies_group is not None:
            broadcast(model.buffers(), group=self._copies_group)

    def _forward(self, model: nn.Module, *inputs: Any) -> Any:
        """Return the model's output on the rank with the last stage, zeros of its shape on the others.

        Without gradients only; every rank of the pipeline must call it with inputs of the same shapes. It returns when
        the next rank has received what this rank's stages return.
        """
        self._sync_training_mode(model)
        hidden = _check_inputs(inputs)
        examples = self._examples_for(_shapes_of(hidden))
        for index, stage in self._stages.items():
            if index > 0 and index - 1 not in self._stages:
                hidden = self._zeros_like(examples[index])
                for tensor in hidden:
                    dist.recv(tensor, group=self._pipeline_group, group_src=self._rank_of(index - 1))
            hidden = _as_tuple(stage(*hidden))
            if index + 1 < self.num_stages and index + 1 not in self._stages:
                for tensor in hidden:
                    dist.send(tensor.contiguous(), group=self._pipeline_group, group_dst=self._rank_of(index + 1))
        if not self._has_last_stage():
            hidden = self._zeros_like(examples[-1])
        return _in_form_of(examples[-1], hidden)

    def _zeros_like(self, example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return zeros of these shapes on this rank's device."""
        return tuple(torch.zeros_like(tensor, device=self._context.device) for tensor in _as_tuple(example))

    def _sync_training_mode(self, model: nn.Module) -> None:
        """Put modules that stages have around the model's own into its mode, training or evaluation."""
        for module in self._wrappers:
            module.training = model.training

    def _compile(self, *args: Any, **options: Any) -> None:
        """Compile each of this rank's stages."""
        for stage in self._stages.values():
            stage.compile(*args, **options)

    @torch.no_grad()
    def _find_examples(self, inputs: _Shapes) -> list[Tensor | tuple[Tensor, ...]]:
        """Return the input of each stage and, at the end, the last stage's output, as meta tensors.

        They are found by a forward of zeros, in eval mode; generators keep their state. Every rank of the pipeline must
        call it.
        """
        context = self._context
        devices = []
        if context.device.type != "cpu":
            devices.append(context.device)
        examples: list[Tensor | tuple[Tensor, ...]] = [_on_meta(inputs)]
        for index in range(self.num_stages):
            example: Tensor | tuple[Tensor, ...] = ()
            if index in self._stages:
                stage = self._stages[index]
                modules_in_training = [module for module in stage.modules() if module.training]
                stage.eval()
                with torch.random.fork_rng(devices=devices, device_type=context.device.type):
                    output = stage(*self._zeros_like(examples[-1]))
                for module in modules_in_training:
                    module.training = True
                example = _in_form_of(output, _on_meta(_shapes_of(_as_tuple(output))))
            source = self._rank_of(index)
            examples.append(broadcast_object(example, context, source=source, group=self._pipeline_group))
        return examples

    def _make_schedule(
        self, shapes: _Shapes, num_microbatches: int, precision: NumberFormats
    ) -> tuple[Any, list[_PaddedStage]]:
        """Return a schedule for windows of so many micro-batches, and this rank's stages in it."""
        with precision.autocast():
            examples = self._examples_for(shapes)
        padded_stages = []
        pipeline_stages = []
        for index, stage in self._stages.items():
            padded_stage = _PaddedStage(stage, precision, example=examples[index + 1])
            pipeline_stage = PipelineStage(
                padded_stage,
                index,
                self.num_stages,
                self._context.device,
                # With these, torch runs nothing to find the shapes.
                input_args=_stage_args(examples[index], have_gradients=index > 0),
                output_args=_stage_args(examples[index + 1], have_gradients=True),
                group=self._pipeline_group,
            )
            padded_stages.append(padded_stage)
            pipeline_stages.append(pipeline_stage)

        schedule_class = _SCHEDULES[self._schedule]
        takes_several = schedule_class is ScheduleInterleaved1F1B
        schedule = schedule_class(
            pipeline_stages if takes_several else pipeline_stages[0],
            n_microbatches=num_microbatches,
            # Looked up at each call: a cached schedule serves many windows.
            loss_fn=lambda output, position: self._loss(output, position),
            scale_grads=False,
        )
        return schedule, padded_stages


def _shapes_of(tensors: Iterable[Tensor]) -> _Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _on_meta(shapes: _Shapes) -> tuple[Tensor, ...]:
    """Return contiguous tensors of these shapes on the meta device."""
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes)


def _in_form_of(example: object, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return the tensor alone if `example` is one, else the tuple."""
    if isinstance(example, Tensor):
        return tensors[0]
    return tensors


def _check_inputs(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return them. Raises TargetError unless all are tensors with the same number of samples."""
    are_tensors = all(isinstance(value, Tensor) and value.ndim for value in inputs)
    if not inputs or not are_tensors or len({len(tensor) for tensor in inputs}) > 1:
        kinds = ", ".join(_kind_of(value) for value in inputs)
        raise TargetError(
            f"strategy=pipeline calls the model with tensors whose first dimension is the sample, and the task passed "
            f"{kinds or 'nothing'}."
        )
    return tuple(inputs)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple. Raises TargetError if it is neither a tensor nor a tuple of tensors."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and output and all(isinstance(value, Tensor) for value in output):
        return tuple(output)
    raise TargetError(
        f"A stage of a pipeline must return a tensor or a tuple of tensors, and one returned a {type(output).__name__}."
    )


# A task knows no stages: it calls a model and computes a loss from its output. It is called twice: on every rank of the
# pipeline with a stand-in for the model that records the inputs and stops, and on the last stage's rank with one that
# returns the output.


def _inputs_of(batch: Batch, *, task: Task, precision: NumberFormats, device: torch.device) -> tuple[Tensor, ...]:
    """Return what the task calls the model with."""
    generators_before = fingerprint([device])
    try:
        with precision.autocast():
            model: Any = _ModelStandIn()
            task.training_step(model, batch)
    except _Recorded as recorded:
        inputs = _check_inputs(recorded.args)
    else:
        raise TargetError(f"{type(task).__name__}.training_step didn't call the model, which a pipeline needs.")
    if fingerprint([device]) != generators_before:
        raise TargetError(
            f"{type(task).__name__}.training_step draws random numbers before it calls the model. With strategy="
            "pipeline it runs on several ranks, which would draw different ones: draw in the dataset or the model."
        )
    return inputs


@final
class _PaddedStage(nn.Module):
    """A stage that computes the real rows of each micro-batch only, and pads its output with zeros.

    The trainer's autocast is entered for each micro-batch, since its cache of weights is that of one forward. The
    output is contiguous, as the tensor that receives it is.

    Args:
        example: The output of a whole micro-batch, on the meta device.
    """

    def __init__(self, stage: nn.Module, precision: NumberFormats, *, example: Tensor | tuple[Tensor, ...]) -> None:
        super().__init__()
        self.stage = stage
        # How many rows of each micro-batch of a window are real, in the order in which every schedule takes them.
        self.real_rows: Iterator[int] = iter(())
        self._precision = precision
        self._example = example

    def forward(self, *inputs: Tensor) -> Any:
        num_real = next(self.real_rows)
        if num_real == 0:
            outputs = self._zeros(inputs)
        else:
            with self._precision.autocast():
                output = self.stage(*_first_rows(inputs, num_real))
            num_rows = len(inputs[0])
            outputs = tuple(_padded(tensor, num_rows).contiguous() for tensor in _as_tuple(output))
        return _in_form_of(self._example, outputs)

    def _zeros(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return zeros that a backward passes through to the inputs."""
        device = inputs[0].device
        # The first stage's inputs need no gradient, so the path begins with something that does.
        path = torch.zeros((), device=device, requires_grad=True)
        for tensor in inputs:
            if tensor.requires_grad:
                path = path + tensor.sum()
        outputs = []
        for example in _as_tuple(self._example):
            zeros = torch.zeros_like(example, device=device)
            if zeros.is_floating_point():
                zeros = zeros + (0 * path).to(zeros.dtype)
            outputs.append(zeros)
        return tuple(outputs)


class _Recorded(BaseException):
    """Ends a task's step when it has called the model. A BaseException, so that the task doesn't catch it."""


@final
class _ModelStandIn:
    """Takes the model's place while a task computes. It can be called once; anything else is an error.

    Args:
        output: What the call returns; None raises _Recorded with the inputs.
    """

    training = True

    def __init__(self, output: Any = None) -> None:
        self._output = output
        self._is_called = False

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        if keywords:
            raise TargetError(
                f"The task calls the model with {', '.join(keywords)}= by name. With strategy=pipeline it passes "
                "tensors by position, which the first stage takes."
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


def _first_rows(output: Any, num_rows: int) -> Any:
    """Return the first rows of a tensor, or of each tensor of a tuple."""
    if not isinstance(output, Tensor):
        return tuple(_first_rows(tensor, num_rows) for tensor in output)
    if len(output) == num_rows:
        return output
    return output[:num_rows]


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    num_missing = num_rows - len(tensor)
    if num_missing == 0:
        return tensor
    zeros = tensor.new_zeros(num_missing, *tensor.shape[1:])
    return torch.cat([tensor, zeros])


def _padded_window(inputs: Sequence[Sequence[Tensor]], *, num_rows: int, num_microbatches: int) -> tuple[Tensor, ...]:
    """Return each of the model's inputs for the whole window, one micro-batch after the other.

    Each micro-batch is padded to `num_rows`, and the window with copies of its last one.
    """
    whole_inputs = []
    for tensors in zip(*inputs, strict=True):
        padded = [_padded(tensor, num_rows) for tensor in tensors]
        padded += [padded[-1]] * (num_microbatches - len(padded))
        whole_inputs.append(torch.cat(padded))
    return tuple(whole_inputs)


def _stage_args(example: Tensor | tuple[Tensor, ...], *, have_gradients: bool) -> tuple[Tensor, ...]:
    """Return copies of example tensors; of floating ones, they require gradients if `have_gradients`."""
    args = []
    for tensor in _as_tuple(example):
        args.append(tensor.detach().requires_grad_(have_gradients and tensor.is_floating_point()))
    return tuple(args)
