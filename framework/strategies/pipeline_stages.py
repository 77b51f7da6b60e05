"""Split a model into stages, of which each rank keeps some."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

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
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
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
