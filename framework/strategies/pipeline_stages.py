"""Split a model into stages, of which each rank keeps some, and pass tensors between them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.sharded import StageLayout
from framework.errors import ConfigError, TargetError
from framework.strategies.parameters import first_few


def split_into_stages(model: nn.Module, number: int) -> list[nn.Module]:
    """Return `number` modules, each taking the output of the one before; their parameters are the model's own.

    A model defines its stages by a method `stages(number)`. A `torch.nn.Sequential` needs none: it is split so that the
    largest stage has as few parameters as possible. Raises TargetError and ConfigError for another model, and if a
    parameter or buffer is in no stage, or a parameter in several.
    """
    name = type(model).__name__
    if callable(getattr(type(model), "stages", None)):  # the class's: a submodule may have that name
        stages = list(model.stages(number))  # type: ignore[operator]
        if len(stages) != number or not all(isinstance(stage, nn.Module) for stage in stages):
            raise TargetError(
                f"{name}.stages({number}) must return {number} modules, and returned {len(stages)}: "
                + ", ".join(type(stage).__name__ for stage in stages)
            )
    elif isinstance(model, nn.Sequential):
        stages = [nn.Sequential(*children) for children in _split_evenly(list(model), number)]
    else:
        raise TargetError(
            f"strategy=pipeline can't cut {name} into {number} stages: it is no torch.nn.Sequential and has no method "
            "`stages`.\nGive it `def stages(self, number)`, which returns that many modules, made of its own ones; "
            "each takes the output of the one before."
        )
    _check_stages(model, stages)
    return stages


def stage_layout(model: nn.Module, stages: Sequence[nn.Module], own: Sequence[int], *, writes: bool) -> StageLayout:
    """Return what a rank with the stages `own` needs to know about the whole model, which must still be complete.

    writes: this rank writes its part to checkpoints.
    """
    parameters = dict(model.named_parameters())
    return StageLayout(
        names=frozenset(model.state_dict()),
        parameters=tuple(parameters),
        num_parameters=sum(each.numel() for each in parameters.values()),
        writes=writes,
        has_output=len(stages) - 1 in own,
    )


def drop_other_stages(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Remove every parameter and buffer that isn't in one of the stages from the model; its modules stay."""
    kept = {id(tensor) for stage in stages for tensor in _tensors(stage)}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in kept:
                    slots[name] = None
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is None:
            module.track_running_stats = False  # it would ask for them when weights are loaded


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _check_stages(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    name = type(model).__name__
    plain = [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if plain:  # checkpoints would lack it
        raise ConfigError(f"strategy=pipeline can't keep what isn't a tensor in {name}'s state: {first_few(plain)}.")
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    known = {id(each) for each in (*parameters.values(), *buffers.values())}
    check_trained(dict(enumerate(stages)), num_stages=len(stages))
    uses: Counter[int] = Counter()
    for stage in stages:
        uses.update({id(each) for each in _tensors(stage)})
    wrong = [key for key, each in parameters.items() if uses[id(each)] != 1]
    wrong += [key for key, each in buffers.items() if uses[id(each)] == 0]
    if wrong or uses.keys() - known:
        raise TargetError(
            f"Stages of {name} must be made of its own modules, not of copies, with each parameter in one stage alone "
            f"and each buffer in one at least. Look at {first_few(wrong)}.\n"
            "Untie parameters that several stages share, use fewer stages, or use strategy=ddp or fsdp."
        )


def check_trained(stages: Mapping[int, nn.Module], *, num_stages: int) -> None:
    """Raise ConfigError for a stage without a parameter to train, through which no backward would pass."""
    for index, stage in stages.items():
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ConfigError(
                f"Stage {index} of {num_stages} has no parameter to train, and strategy=pipeline needs one in each.\n"
                "Train one, or use fewer stages (strategy.num_stages) or another strategy."
            )


def _split_evenly(children: Sequence[nn.Module], number: int) -> list[Sequence[nn.Module]]:
    """Split them into runs, each with something to train, of which the largest is as small as possible."""
    sizes = [sum(each.numel() for each in child.parameters()) for child in children]
    trains = [any(each.requires_grad for each in child.parameters()) for child in children]
    if sum(trains) < number:
        raise ConfigError(
            f"A torch.nn.Sequential with {sum(trains)} trained modules can't be cut into {number} stages. Use at most "
            f"strategy.num_stages={sum(trains)}, or modules of smaller parts."
        )
    before = [0, *itertools.accumulate(sizes)]

    @functools.cache
    def best(end: int, number: int) -> tuple[float, tuple[int, ...]]:
        """Return the size of the largest of `number` runs of the first `end` children, and where each ends."""
        if number == 0:
            return (0 if end == 0 else math.inf), ()
        ways = (
            (max(best(begin, number - 1)[0], before[end] - before[begin]), (*best(begin, number - 1)[1], end))
            for begin in range(end)
            if any(trains[begin:end])
        )
        return min(ways, default=(math.inf, ()))

    return [children[begin:end] for begin, end in itertools.pairwise((0, *best(len(children), number)[1]))]


# The stages of one rank


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Of the tensors that a stage takes."""


@final
class LocalStages:
    """This rank's stages of `model` by number, and a forward through the stages of all ranks for evaluation.

    The schedules of torch.distributed.pipelining need shapes that never change; evaluation's batches have any, so its
    forward is our own. group: the ranks of one pipeline, with stage s on rank s modulo its size.
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
        self._wrappers = [each for stage in stages.values() for each in stage.modules() if each not in within]
        self._num_ranks = dist.get_world_size(group)
        self._known_outputs: dict[Shapes, list[Tensor | tuple[Tensor, ...]]] = {}

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output on the rank with the last stage, zeros of its shape on the others.

        Without gradients only; every rank of the pipeline must call it with inputs of the same shapes. It returns when
        the next rank has received what this rank's stages return.
        """
        self.sync_training_mode()
        hidden = check_inputs(inputs)
        outputs = self.example_outputs(tuple((tuple(each.shape), each.dtype) for each in hidden))
        for number, stage in self.stages.items():
            if number > 0 and number - 1 not in self.stages:
                hidden = self.zeros_like(outputs[number - 1])
                for tensor in hidden:
                    dist.recv(tensor, group=self.group, group_src=(number - 1) % self._num_ranks)
            hidden = as_tuple(stage(*hidden))
            if number + 1 < self.num_stages and number + 1 not in self.stages:
                for tensor in hidden:
                    dist.send(tensor.contiguous(), group=self.group, group_dst=(number + 1) % self._num_ranks)
        if self.num_stages - 1 not in self.stages:
            hidden = self.zeros_like(outputs[-1])
        return hidden[0] if isinstance(outputs[-1], Tensor) else hidden

    def example_outputs(self, inputs: Shapes) -> list[Tensor | tuple[Tensor, ...]]:
        """Return what each stage returns for such inputs, on the meta device, found by a forward of zeros.

        Every rank of the pipeline must call it. Modules run in eval mode, and generators keep their state.
        """
        if inputs not in self._known_outputs:
            devices = [] if self.device.type == "cpu" else [self.device]
            with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=self.device.type):
                self._known_outputs[inputs] = self._find_outputs(inputs)
        return self._known_outputs[inputs]

    def zeros_like(self, example: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return zeros of these shapes on this rank's device."""
        return tuple(torch.zeros_like(each, device=self.device) for each in as_tuple(example))

    def sync_training_mode(self) -> None:
        """Put modules that stages have around the model's own into its mode, training or evaluation."""
        for module in self._wrappers:
            module.training = self._model.training

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile each of this rank's stages."""
        for stage in self.stages.values():
            stage.compile(*args, **options)

    def _find_outputs(self, inputs: Shapes) -> list[Tensor | tuple[Tensor, ...]]:
        found: list[Tensor | tuple[Tensor, ...]] = [on_meta(inputs)]
        for number in range(self.num_stages):
            example: list[Any] = [None]
            if number in self.stages:
                stage = self.stages[number]
                training = [module for module in stage.modules() if module.training]
                stage.eval()
                output = stage(*self.zeros_like(found[-1]))
                for module in training:
                    module.training = True
                outputs = on_meta((tuple(each.shape), each.dtype) for each in as_tuple(output))
                example = [outputs[0] if isinstance(output, Tensor) else outputs]
            dist.broadcast_object_list(example, group=self.group, group_src=number % self._num_ranks)
            found += example
        return found[1:]


def on_meta(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> tuple[Tensor, ...]:
    """Return contiguous tensors of these shapes on the meta device."""
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes)


def check_inputs(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return them. Raises TargetError unless all are tensors with the same number of samples."""
    sizes = {each.shape[0] if isinstance(each, Tensor) and each.ndim else None for each in inputs}
    if not inputs or None in sizes or len(sizes) > 1:
        given = ", ".join(
            f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            for each in inputs
        )
        raise TargetError(
            f"strategy=pipeline calls the model with tensors whose first dimension is the sample, and the task passed "
            f"{given or 'nothing'}."
        )
    return tuple(inputs)


def as_tuple(output: Any) -> tuple[Tensor, ...]:
    """Return a stage's output as a tuple. Raises TargetError if it is neither a tensor nor a tuple of tensors."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)) and output and all(isinstance(each, Tensor) for each in output):
        return tuple(output)
    raise TargetError(
        f"A stage of a pipeline must return a tensor or a tuple of tensors, and one returned a {type(output).__name__}."
    )
